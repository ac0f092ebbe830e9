#pragma once

#include <cstdint>
#include <vector>

#include "device/nccl_call.h"
#include "engine/group.h"

namespace pycomm {

/// The group's calls as NCCL's: several of them if NCCL has no such collective. Uneven all_gather and reduce_scatter are a broadcast
/// or reduce per rank, gather and scatter an all_to_all in which most ranks have nothing for most others.
class NcclCalls {
 public:
  NcclCalls(int rank, int size) : rank_(rank), size_(size) {}

  /// `operation` gives the name and number that errors have.
  void add(const Group::Call& call, const Operation& operation);
  [[nodiscard]] const std::vector<cuda::NcclCall>& list() const noexcept {
    return list_;
  }

 private:
  using Counts = std::vector<uint64_t>;
  void addParts(cuda::NcclCall each, const Group::Call& call);
  void exchange(cuda::NcclCall each, Counts sent, Counts received);

  const int rank_;
  const int size_;
  std::vector<cuda::NcclCall> list_;
};

} // namespace pycomm
