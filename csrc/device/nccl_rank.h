#pragma once

#include <string>

#include "base/error.h"
#include "device/device_runtime.h"
#include "device/nccl_api.h"
#include "device/nccl_call.h"

namespace pycomm::cuda {

/// One rank of a communicator: what calls NCCL, where its work goes, and whom its errors name. `api` and `runtime` outlive this.
struct NcclRank {
  NcclApi& api;
  DeviceRuntime& runtime;
  int rank = 0;
  int job_rank = 0; ///< what errors call it
  int size = 1;
  std::string group;
  Stream stream = nullptr; ///< the side stream

  /// Throws Error if `result` of NCCL's function `call` is a failure.
  void check(NcclResult result, const char* call, NcclHandle comm) const;
  /// An error's fields that name a call of this rank.
  [[nodiscard]] ErrorRecord about(const NcclCall& call) const;
};

} // namespace pycomm::cuda
