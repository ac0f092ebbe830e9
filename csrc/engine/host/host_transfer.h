#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/buffer_view.h"
#include "engine/host/host_memory.h"
#include "engine/operation/operation.h"
#include "engine/operation/piece_flow.h"
#include "schedule/partition.h"

namespace pycomm {

/// One operation on one rank, in memory that the ranks of the host share.
///
/// All ranks have the same tickets for the same operations, and run them in that order. A rank *enters* an operation by storing its
/// descriptor in its slot; nothing of an output is written before the descriptors of all ranks have been compared. Then one of three:
///   - small (up to kHostInlineNbytes per rank): the payload is in the slot, every rank folds all payloads in rank order, so all have
///     the same bits;
///   - large: in rounds, through the stages;
///   - large, and every rank's tensors lie in heaps that all ranks reach: in place.
/// All ranks see in the slots alike which of them it is. Unless it runs in place, user memory is touched by its own rank alone.
///
/// In rounds: each goes through three steps, two rounds are under way at once. all_reduce with 2 ranks, round g, as one rank sees it:
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
/// "Scaled" is PREMUL_SUM: only the stage has the scaled operand; without a factor the fold takes this rank's from its input. Every rank
/// stores `collected` after it has read all of these, also where it copies nothing, so that one counter answers for each kind.
/// tests/cpp/host_walk tries all interleavings of all loads and stores of these counters, sequentially consistent ones, and fails if one asks
/// for a weaker order, but a load of a rank's own.
///
/// In place: one round without stages. all_reduce: each rank folds its slice from where all inputs lie, and writes it to where all
/// outputs lie. The others copy or fold from the inputs. Each sum is made by the same rank in the same order as in rounds.
///
/// Thread: the one that runs the operation.
class HostTransfer {
 public:
  /// What one call of advance() did.
  enum class AdvanceResult {
    Blocked, ///< other ranks must go on first
    Moved,
    Done,
  };

  /// `memory` outlives this.
  HostTransfer(const HostMemory& memory, std::shared_ptr<Operation> operation, uint64_t ticket);

  /// How the operand of such an operation comes and goes in pieces; null if there is one piece only, as of all that are not large().
  [[nodiscard]] static std::shared_ptr<PieceFlow> piecesOf(const Descriptor& descriptor, int size);

  /// Needs more than a slot holds, so this rank's stages must be committed first.
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

  /// Goes on by one step where it can. `rounds` counts those of all operations of the group, and is raised when this one has all
  /// descriptors. Where it cannot, `blocked` gets a bit for each rank that must go on first.
  /// `ending`: this rank gives up. In place it begins no further step; all else goes on.
  /// Throws Error(CollectiveMismatch) if another rank asks for something else.
  [[nodiscard]] AdvanceResult advance(uint64_t& rounds, bool ending, uint64_t& blocked);

  [[nodiscard]] const std::shared_ptr<Operation>& operation() const noexcept {
    return operation_;
  }
  [[nodiscard]] uint64_t ticket() const noexcept {
    return ticket_;
  }
  /// A peer has entered another operation instead: the ranks took different ways before. What the ranks tell each other over links
  /// says how.
  [[nodiscard]] bool astray() const noexcept {
    return astray_;
  }
  /// The ranks (bits) whose slots do not show that they have entered it. Not once this rank has ended it.
  [[nodiscard]] uint64_t lacking() const noexcept;
  /// What `peer` writes in this rank's output at this moment. Once this rank has set `left`, no peer begins to write, and so this
  /// becomes empty for good as soon as that peer has ended the step that it is in.
  [[nodiscard]] BufferView writtenBy(int peer) const noexcept;

 private:
  enum class Phase {
    Matching, ///< some descriptors have not been compared
    InRounds,
    InPlace,
    InPlaceMade, ///< this rank's part is done, and it waits for the others'
  };
  /// An operand of each rank, by rank.
  using Sources = std::array<const void*, kMaxHostRanks>;
  /// One rank's in its heap, as mapped here. The slots are read once, and what they say is checked.
  struct Operands {
    const std::byte* input = nullptr;
    std::byte* output = nullptr;
  };

  // ---- what it is
  [[nodiscard]] const HostView& view() const noexcept {
    return memory_->view();
  }
  [[nodiscard]] const Operation::Request& request() const noexcept {
    return operation_->request();
  }
  [[nodiscard]] bool isRoot() const noexcept {
    return root_ == view().rank;
  }
  [[nodiscard]] size_t nbytesOf(int64_t elements) const noexcept {
    return static_cast<size_t>(elements) * element_nbytes_;
  }
  [[nodiscard]] int64_t inputNumel() const noexcept;
  /// Parts for or from each rank, where the operation has some.
  [[nodiscard]] const std::byte* inputPart(int of) const noexcept;
  [[nodiscard]] std::byte* outputPart(int of) const noexcept;

  // ---- elements
  /// Copies elements of this rank to where others read them: PREMUL_SUM scales here.
  void give(std::byte* to, const std::byte* from, int64_t elements) const;
  /// Reduces the operands of all ranks, lowest rank first: all ranks get the same bits.
  void fold(std::byte* to, const Sources& sources, int64_t elements) const;

  // ---- descriptors, and small operations
  [[nodiscard]] AdvanceResult match(uint64_t& blocked);
  [[nodiscard]] AdvanceResult matched(uint64_t& rounds);
  void givePayload() const;
  void finishSmall() const;
  void foldPayloads(size_t offset) const;

  // ---- in rounds
  [[nodiscard]] AdvanceResult advanceRounds(uint64_t& blocked);
  [[nodiscard]] bool mayStage(uint64_t& blocked) const noexcept;
  [[nodiscard]] bool mayReduce(uint64_t& blocked) const noexcept;
  [[nodiscard]] bool mayCollect(uint64_t& blocked) const noexcept;
  void stage();
  void reduce();
  void collect();
  void foldStages(std::byte* to, const std::byte* own, size_t offset, int64_t elements) const;
  /// The elements of a round: of the tensor, or of each part.
  [[nodiscard]] int64_t firstOf(uint64_t round) const noexcept;
  [[nodiscard]] int64_t countOf(uint64_t round) const noexcept;

  // ---- in place
  void publishPlaces(HostSlot& slot) const;
  [[nodiscard]] bool reachOperands();
  [[nodiscard]] std::byte* inHeap(int of, uint64_t place, size_t nbytes) const;
  [[nodiscard]] AdvanceResult advanceInPlace(bool ending, uint64_t& blocked);
  [[nodiscard]] Run workInPlace() const noexcept;
  [[nodiscard]] int64_t stepNumel() const noexcept;
  void allReduceInPlace(int64_t first, int64_t elements) const;
  void readInPlace(int64_t first, int64_t elements) const;
  [[nodiscard]] bool operandsLasted(uint64_t& blocked) const noexcept;

  const HostMemory* memory_;
  std::shared_ptr<Operation> operation_;
  uint64_t ticket_;
  Collective kind_;
  size_t element_nbytes_;
  int64_t numel_; ///< of the tensor, or of one part
  int root_ = -1;
  bool scales_; ///< PREMUL_SUM

  Phase phase_ = Phase::Matching;
  bool astray_ = false;
  int matched_ = 0; ///< ranks whose descriptors have been compared

  // Rounds are counted over all operations of the group in HostProgress, where one in place is one round, and here from the first of this one.
  uint64_t base_ = 0; ///< rounds of earlier operations
  uint64_t rounds_ = 0; ///< that this one would take through stages. 0: what the ranks give fits their slots
  int64_t round_numel_ = 0; ///< elements of the tensor, or of one part, in a full round
  uint64_t staged_ = 0; ///< collected_ <= reduced_ <= staged_ <= rounds_, as the next two
  uint64_t reduced_ = 0;
  uint64_t collected_ = 0;

  std::vector<Operands> operands_; ///< in place: by rank
  int64_t position_ = 0; ///< in place: elements that this rank has made, or copied
};

} // namespace pycomm
