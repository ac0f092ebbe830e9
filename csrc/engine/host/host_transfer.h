#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/buffer_view.h"
#include "engine/host/host_layout.h"
#include "engine/operation/operation.h"
#include "schedule/step.h"
#include "transport/memory/shared_heap.h"

namespace pycomm {

/// One operation on one rank, in memory that the ranks of the group share.
///
/// All ranks have the same tickets for the same operations, and run them in that order. A rank *enters* an operation by storing its
/// descriptor in its slot; nothing of an output is written before the descriptors of all ranks have been compared. User memory is
/// touched by its own rank alone: what others need of it is copied to the slot or the stage.
///
/// Small (up to kHostInlineNbytes a rank): the payload is in the slot, every rank folds all payloads in rank order, so all have the
/// same bits.
///
/// Large: in rounds, each through three steps, two rounds under way at once. all_reduce with 2 ranks, round g, a rank's view:
///   stage    copies its input to its stage, but for its own slice            staged = g + 1
///   reduce   once all have staged: folds its slice of all, lowest rank first, into the output, and copies that to the place of
///            its slice in its stage, which is free                           reduced = g + 1
///   collect  once all have reduced: copies the other slices from their owners' stages to the output      collected = g + 1
/// A stage is written again for round g + 2 once all have collected round g. One rank makes each sum, so all have the same bits.
/// all_gather and broadcast stage and collect; reduce_scatter stages and reduces.
///
/// In place: where what others need lies in the heaps of the ranks (SharedHeap), there is one round without stages. all_reduce: each
/// rank folds its slice from where all inputs lie, and writes it to where all outputs lie. The others copy or fold from the inputs.
/// Whether it can be done is seen by all ranks alike, in the slots; each sum is made by the same rank in the same order either way.
class HostTransfer {
 public:
  /// `heap`: where operands may lie that peers can reach; null where they cannot.
  HostTransfer(const HostView& view, const SharedHeap* heap, std::shared_ptr<Operation> operation, uint64_t ticket);

  /// How the operand of such an operation comes and goes in pieces; null where it is too small.
  [[nodiscard]] static std::shared_ptr<PieceFlow> piecesOf(const Descriptor& descriptor, int size);

  /// Needs more than a slot holds, so this rank's stage must be committed first.
  [[nodiscard]] bool large() const noexcept {
    return rounds_ > 0;
  }
  /// Whether its input is there, and the slot is free: all, this rank among them, are done with its last operation. Else `blocked` gets
  /// the bit of a rank that is not.
  [[nodiscard]] bool mayEnter(uint64_t& blocked) const noexcept;
  void enter();
  /// After enter(), and before this rank gives the operation up: a rank that has not compared the descriptors yet finds that this rank
  /// has not entered, and so cannot end well what has failed here.
  void withdraw() const noexcept;

  enum class Progress { Blocked, Moved, Done, Differs };
  /// Goes on by one step where it can. `rounds` counts those of all operations of the group, and is raised when this one has all
  /// descriptors. Where it cannot, `blocked` gets a bit for each rank that must go on first.
  [[nodiscard]] Progress advance(uint64_t& rounds, uint64_t& blocked);

  [[nodiscard]] const std::shared_ptr<Operation>& operation() const noexcept {
    return operation_;
  }
  [[nodiscard]] uint64_t ticket() const noexcept {
    return ticket_;
  }
  /// After Progress::Differs: who asks for something else, and for what.
  [[nodiscard]] int differentPeer() const noexcept {
    return matched_;
  }
  [[nodiscard]] Descriptor differentDescriptor() const noexcept {
    return Descriptor::readFrom(view_.slot(matched_, ticket_).header);
  }
  /// A peer has entered another operation instead: the ranks took different ways before. What the ranks tell each other by TCP says
  /// how.
  [[nodiscard]] bool astray() const noexcept {
    return astray_;
  }

  /// What peers may be reading or writing: nothing unless published.
  struct Published {
    ConstBufferView input;
    BufferView output;
  };
  [[nodiscard]] Published published() const noexcept {
    return published_;
  }

  TimePoint tell_at; ///< when the lane is told, or told again, that this one waits
  bool told = false;

 private:
  [[nodiscard]] Progress match(uint64_t& blocked);
  void finishSmall() const;
  void publish(HostSlot& slot);
  [[nodiscard]] bool reachOperands();
  [[nodiscard]] Progress advanceInPlace(uint64_t& blocked);
  [[nodiscard]] bool operandsLasted(uint64_t& blocked) const noexcept;
  void allReduceInPlace(int64_t first, int64_t numel) const;
  void readInPlace(int64_t first, int64_t numel) const;
  [[nodiscard]] bool allHave(std::atomic<uint64_t> HostProgress::* counter, uint64_t count, uint64_t& blocked)
      const noexcept;
  [[nodiscard]] bool mayStage(uint64_t& blocked) const noexcept;
  [[nodiscard]] bool mayReduce(uint64_t& blocked) const noexcept;
  [[nodiscard]] bool mayCollect(uint64_t& blocked) const noexcept;
  void stage();
  void reduce();
  void collect();
  /// The elements of a round: of the tensor, or of each part.
  [[nodiscard]] int64_t firstOf(uint64_t round) const noexcept;
  [[nodiscard]] int64_t countOf(uint64_t round) const noexcept;
  [[nodiscard]] const std::byte* inputPart(int of) const noexcept;
  [[nodiscard]] std::byte* outputPart(int of) const noexcept;
  /// Copies elements for others to reduce: PREMUL_SUM scales here.
  void give(std::byte* to, const std::byte* from, int64_t numel) const;
  void fold(std::byte* to, const std::byte* own, size_t offset_in_stage, int64_t numel) const;

  HostView view_;
  const SharedHeap* heap_;
  std::shared_ptr<Operation> operation_;
  uint64_t ticket_;
  Collective kind_;
  size_t element_nbytes_;
  int64_t numel_; ///< of the tensor, or of one part
  int64_t round_numel_ = 0; ///< of the tensor, or of one part, in a full round
  uint64_t rounds_ = 0; ///< 0: small
  bool scales_; ///< PREMUL_SUM
  bool in_place_ = false;
  /// In place: the ranks' operands, as they are mapped here. The slots are read once, and what they say is checked.
  struct Operands {
    const std::byte* input = nullptr;
    std::byte* output = nullptr;
  };
  std::vector<Operands> operands_; ///< by rank
  int64_t position_ = 0; ///< in place: elements that this rank has made, or copied
  Published published_;
  int matched_ = 0; ///< ranks whose descriptors have been compared
  bool astray_ = false;
  uint64_t base_ = 0; ///< rounds of earlier operations
  uint64_t staged_ = 0;
  uint64_t reduced_ = 0;
  uint64_t collected_ = 0;
};

} // namespace pycomm
