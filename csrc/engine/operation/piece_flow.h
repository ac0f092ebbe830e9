#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "engine/operation/prepared_schedule.h"

namespace pycomm {

/// An operation whose input comes to its memory piece by piece while it runs, and whose output leaves that so (Group::Call::in_pieces):
/// the copies from and to a device go on at the same time as the network.
///
/// How it is cut, and in which order pieces are wanted, follows from what this rank does in the operation, and is its own affair:
/// nothing of it is on the wire, the other ranks may have other pieces or none, and the result has the same bits. Example, rank 1 of a
/// ring of 2, whose chunks have two pieces each: the first steps send the beginning of chunk 1 and add to the beginning of chunk 0, so
/// the pieces are wanted in the order 2, 0, 3, 1.
class PieceFlow {
 public:
  struct Piece {
    size_t offset = 0; ///< bytes, in the input or the output
    size_t nbytes = 0;
  };
  using Leave = std::function<void(size_t piece)>;

  static constexpr int64_t kPlain = -1;
  struct Operand {
    size_t nbytes = 0;
    int64_t encoded_part = kPlain; ///< else it lies encoded in its memory, in parts of so many values
  };
  /// `same_memory`: the output lies where the input does, so that nothing may be written there before its input has come.
  /// Null where there would be one piece only.
  [[nodiscard]] static std::shared_ptr<PieceFlow> ofSchedule(
      const PreparedSchedule& prepared,
      const Operand& input,
      const Operand& output,
      bool same_memory);

  /// Of an operation in shared memory, whose round g reads and writes bytes from g * round_nbytes on of each part.
  struct Rounds {
    size_t part_nbytes = 0;
    size_t round_nbytes = 0; ///< of a part
    size_t input_parts = 1;
    size_t output_parts = 1;
  };
  [[nodiscard]] static std::shared_ptr<PieceFlow> ofRounds(const Rounds& rounds);

  /// In the order in which they are wanted.
  [[nodiscard]] const std::vector<Piece>& arriving() const noexcept {
    return arriving_;
  }
  [[nodiscard]] const std::vector<Piece>& leaving() const noexcept {
    return leaving_;
  }
  /// Before the operation is released. It calls `leave` once for each piece of leaving() that it is done with: not for pieces that it does
  /// not write, nor for those that it never reaches. On a native thread: `leave` must not block, nor throw.
  void onLeave(Leave leave) {
    leave_ = std::move(leave);
  }

  /// The first `count` of arriving() have come. Any thread, with a count that only rises; see Group::release.
  void arrive(size_t count) noexcept {
    arrived_.store(count, std::memory_order_seq_cst);
  }
  [[nodiscard]] size_t arrived() const noexcept {
    return arrived_.load(std::memory_order_seq_cst);
  }
  [[nodiscard]] bool allArrived() const noexcept {
    return arrived() >= arriving_.size();
  }

  /// All steps, in the order in which their input comes, and whether that of the one at `place` is there.
  [[nodiscard]] uint32_t stepAt(size_t place) const noexcept {
    return step_order_[place];
  }
  [[nodiscard]] bool hasInputOf(size_t place) const noexcept {
    return needed_by_step_[step_order_[place]] <= arrived();
  }
  void stepEnded(uint32_t step);

  /// The same of rounds.
  [[nodiscard]] size_t neededInRound(uint64_t round) const noexcept;
  void roundEnded(uint64_t round);

 private:
  struct Span {
    uint32_t first = 0; ///< pieces
    uint32_t last = 0; ///< not among them
  };
  [[nodiscard]] static Span spanOf(
      const PreparedSchedule& prepared,
      const Region& region,
      const Operand& operand,
      size_t piece_nbytes);
  void cutRounds(std::vector<Piece>& pieces, size_t parts) const;
  void leave(size_t piece) const {
    if (leave_) {
      leave_(piece);
    }
  }

  std::vector<Piece> arriving_;
  std::vector<Piece> leaving_;
  std::atomic<size_t> arrived_{0};
  Leave leave_;
  std::vector<uint32_t> needed_by_step_; ///< so many pieces have to have come before it may run
  std::vector<uint32_t> step_order_; ///< see stepAt()
  std::vector<Span> written_by_step_;
  std::vector<uint32_t> writers_left_; ///< by piece of leaving(): steps that have still to write there
  Rounds rounds_;
  uint64_t round_count_ = 0;
  uint64_t rounds_a_piece_ = 1;
};

} // namespace pycomm
