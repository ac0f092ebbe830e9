#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/buffer_view.h"
#include "engine/host/host_operation.h"
#include "transport/memory/shared_heap.h"

namespace pycomm {

/// A large operation whose tensors the ranks reach in each other's heaps (SharedHeap): one round without stages. all_reduce: each rank
/// folds its slice from where all inputs lie, and writes it to where all outputs lie. The others copy or fold from the inputs.
/// Each sum is made by the same rank in the same order as in HostRounds.
///
///   publish()  writes into this rank's slot where its tensors lie        before this rank enters
///   reach()    maps the tensors of all ranks; all ranks find the same    after the ranks' descriptors were compared
///   begin()    and advance(), if reach() was true
/// Thread: the one that runs the operation.
class HostInPlace {
 public:
  using AdvanceResult = HostOperation::AdvanceResult;

  /// `heap`: where tensors lie that peers can reach; null if peers are to reach none of this operation.
  void publish(const HostOperation& op, const SharedHeap* heap, HostSlot& slot);
  /// Whether each rank reaches all the operands that it needs.
  [[nodiscard]] bool reach(const HostOperation& op);
  /// `earlier`: rounds of the operations before it. This one is one round.
  void begin(uint64_t earlier) noexcept {
    base_ = earlier;
  }
  /// About 1 MiB of this rank's work, or one step to the end of the operation. `ending`: nothing but the end, since a rank that has work
  /// left keeps all others from ending this operation well.
  [[nodiscard]] AdvanceResult advance(const HostOperation& op, bool ending, uint64_t& blocked);

  /// What `peer` writes in this rank's output at this moment. Once this rank has set `left`, no peer begins to write, and so this
  /// becomes empty for good as soon as that peer has ended the step that it is in.
  [[nodiscard]] static BufferView writtenBy(const HostOperation& op, int peer) noexcept;

 private:
  [[nodiscard]] static bool operandsLasted(const HostOperation& op, uint64_t& blocked) noexcept;
  void allReduce(const HostOperation& op, int64_t first, int64_t numel) const;
  void read(const HostOperation& op, int64_t first, int64_t numel) const;

  /// One rank's, as they are mapped here. The slots are read once, and what they say is checked.
  struct Operands {
    const std::byte* input = nullptr;
    std::byte* output = nullptr;
  };
  std::vector<Operands> operands_; ///< by rank
  uint64_t base_ = 0; ///< rounds of earlier operations
  int64_t position_ = 0; ///< elements that this rank has made, or copied
  bool finished_ = false; ///< this rank has said that its part is done
};

} // namespace pycomm
