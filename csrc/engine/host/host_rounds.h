#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "engine/host/host_operation.h"
#include "engine/operation/descriptor.h"
#include "engine/operation/piece_flow.h"

namespace pycomm {

/// A large operation, staged: it goes in rounds, each through three steps, two rounds under way at once. all_reduce with 2 ranks, round g,
/// as one rank sees it:
///   stage    copies its input to its stage, but for its own slice            staged = g + 1
///   reduce   once all have staged: folds its slice of all, lowest rank first, into the output, and copies that to the place of
///            its slice in its stage, which is free                           reduced = g + 1
///   collect  once all have reduced: copies the other slices from their owners' stages to the output      collected = g + 1
/// One rank makes each sum, so all have the same bits. all_gather and broadcast stage and collect; reduce_scatter stages and reduces.
///
/// A stage is written again for round g + 2 once all ranks, its own among them, have collected round g. What lies in rank r's stage
/// of round g, the ranks that read it, and the counter that says that they have:
///
///                        its parts for others                 its own part                        the sum of its own part
///   all_reduce           each other one folds its: reduced    nobody; if scaled r: reduced        the others copy it: collected
///   reduce_scatter       each other one folds its: reduced    nobody; if scaled r: reduced        (lies in no stage)
///   all_gather           the others copy it: collected        nobody                              (none)
///   broadcast, r: root   the others copy it: collected        nobody                              (none)
///
/// "Scaled" is PREMUL_SUM: only the stage has the scaled operand; without a factor `fold` takes this rank's from its input. Every rank
/// stores `collected` after it has read all of these, also where it copies nothing, so that one counter answers for each kind.
/// tests/cpp/host_walk tries all orders of all loads and stores of these counters.
///
/// Rounds are counted over all operations of the group, in HostProgress; here from the first of this operation.
/// Thread: the one that runs the operation.
class HostRounds {
 public:
  using AdvanceResult = HostOperation::AdvanceResult;

  explicit HostRounds(const HostOperation& op);

  /// How the operand of such an operation comes and goes in pieces; null if it is too small for rounds.
  [[nodiscard]] static std::shared_ptr<PieceFlow> piecesOf(const Descriptor& descriptor, int size);

  /// The rounds of the operation. 0: what the ranks give fits their slots.
  [[nodiscard]] uint64_t count() const noexcept {
    return count_;
  }
  /// All ranks have entered the operation. `earlier`: rounds of the operations before it.
  void begin(uint64_t earlier) noexcept {
    base_ = earlier;
  }
  /// One step, if any can be done: first one that others wait for. Else `blocked` gets a bit for each rank that must go on first.
  [[nodiscard]] AdvanceResult advance(const HostOperation& op, uint64_t& blocked);

 private:
  [[nodiscard]] bool mayStage(const HostOperation& op, uint64_t& blocked) const noexcept;
  [[nodiscard]] bool mayReduce(const HostOperation& op, uint64_t& blocked) const noexcept;
  [[nodiscard]] bool mayCollect(const HostOperation& op, uint64_t& blocked) const noexcept;
  void stage(const HostOperation& op);
  void reduce(const HostOperation& op);
  void collect(const HostOperation& op);
  void fold(const HostOperation& op, std::byte* to, const std::byte* own, size_t offset, int64_t numel) const;
  /// The elements of a round: of the tensor, or of each part.
  [[nodiscard]] int64_t firstOf(uint64_t round) const noexcept;
  [[nodiscard]] int64_t countOf(const HostOperation& op, uint64_t round) const noexcept;

  int64_t round_numel_ = 0; ///< of the tensor, or of one part, in a full round
  uint64_t count_ = 0;
  uint64_t base_ = 0; ///< rounds of earlier operations
  uint64_t staged_ = 0; ///< rounds of this one. collected_ <= reduced_ <= staged_ <= count_, as the next two
  uint64_t reduced_ = 0;
  uint64_t collected_ = 0;
};

} // namespace pycomm
