#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "cuda/c_api.h"
#include "engine/group.h"

namespace pycomm {

/// The group's calls as those of the CUDA library. Several of NCCL's where it has no such collective: uneven all_gather and
/// reduce_scatter are a broadcast or reduce a rank, gather and scatter an all_to_all in which most have nothing for most.
class NcclCalls {
 public:
  NcclCalls(int rank, int size) : rank_(rank), size_(size) {}

  /// `operation` gives the name and number that errors have.
  void add(const Group::Call& call, const Operation& operation);
  [[nodiscard]] const std::vector<PycommCudaNcclCall>& list() const noexcept {
    return list_;
  }

 private:
  using Counts = std::vector<uint64_t>;
  void addParts(PycommCudaNcclCall each, const Group::Call& call);
  void exchange(PycommCudaNcclCall each, Counts sent, Counts received);

  const int rank_;
  const int size_;
  std::vector<PycommCudaNcclCall> list_;
  std::deque<Counts> counts_; ///< which list_ points at
};

} // namespace pycomm
