#pragma once

#include <cstdint>
#include <memory>

#include "engine/host/host_in_place.h"
#include "engine/host/host_layout.h"
#include "engine/host/host_operation.h"
#include "engine/host/host_rounds.h"
#include "engine/operation/operation.h"
#include "transport/memory/shared_heap.h"

namespace pycomm {

/// One operation on one rank, in memory that the ranks of the group share.
///
/// All ranks have the same tickets for the same operations, and run them in that order. A rank *enters* an operation by storing its
/// descriptor in its slot; nothing of an output is written before the descriptors of all ranks have been compared. Then one of three:
///   - small (up to kHostInlineNbytes per rank): the payload is in the slot, every rank folds all payloads in rank order, so all have
///     the same bits;
///   - large: HostRounds copies through the stages;
///   - large, and every rank's tensors lie in heaps that all ranks reach: HostInPlace.
/// All ranks see in the slots alike which of them it is. Unless it runs in place, user memory is touched by its own rank alone.
///
/// Thread: the one that runs the operation.
class HostTransfer {
 public:
  using AdvanceResult = HostOperation::AdvanceResult;

  /// `heap`: where operands may lie that peers can reach; null where they cannot.
  HostTransfer(const HostView& view, const SharedHeap* heap, std::shared_ptr<Operation> operation, uint64_t ticket)
      : op_(view, std::move(operation), ticket), heap_(heap), rounds_(op_) {}

  /// Needs more than a slot holds, so this rank's stage must be committed first.
  [[nodiscard]] bool large() const noexcept {
    return rounds_.count() > 0;
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
  /// `ending`: this rank gives up, and does no work that keeps all others from ending the operation well.
  [[nodiscard]] AdvanceResult advance(uint64_t& rounds, bool ending, uint64_t& blocked);

  [[nodiscard]] const std::shared_ptr<Operation>& operation() const noexcept {
    return op_.operation;
  }
  [[nodiscard]] uint64_t ticket() const noexcept {
    return op_.ticket;
  }
  /// After AdvanceResult::Differs: who asks for something else, and for what.
  [[nodiscard]] int differentPeer() const noexcept {
    return matched_;
  }
  [[nodiscard]] Descriptor differentDescriptor() const noexcept {
    return Descriptor::readFrom(op_.view.slot(matched_, op_.ticket).header);
  }
  /// A peer has entered another operation instead: the ranks took different ways before. What the ranks tell each other over links
  /// says how.
  [[nodiscard]] bool astray() const noexcept {
    return astray_;
  }
  /// The ranks (bits) whose slots do not show that they have entered it. Not once this rank has ended it.
  [[nodiscard]] uint64_t lacking() const noexcept;
  /// What a peer writes in this rank's output: see HostInPlace.
  [[nodiscard]] BufferView writtenBy(int peer) const noexcept {
    return HostInPlace::writtenBy(op_, peer);
  }

 private:
  enum class Phase {
    Matching, ///< some descriptors have not been compared
    InRounds,
    InPlace,
  };

  [[nodiscard]] AdvanceResult match(uint64_t& blocked);
  [[nodiscard]] AdvanceResult matched(uint64_t& rounds);
  void givePayload() const;
  void finishSmall() const;
  void foldPayloads(size_t offset) const;

  HostOperation op_;
  const SharedHeap* heap_;
  HostRounds rounds_;
  HostInPlace in_place_;
  Phase phase_ = Phase::Matching;
  int matched_ = 0; ///< ranks whose descriptors have been compared
  bool astray_ = false;
};

} // namespace pycomm
