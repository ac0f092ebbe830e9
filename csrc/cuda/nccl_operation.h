#pragma once

#include "base/deadline.h"
#include "base/error.h"
#include "cuda/device_runtime.h"

namespace pycomm::cuda {

/// One NcclComm::start(). `end` and `done` are guarded by the communicator's state_mutex_; the rest is written once.
class NcclOperation {
 public:
  Event end = nullptr; ///< the communicator's again once `done`
  bool done = false;
  Deadline deadline = Deadline::never();
  TimePoint issued_at;
  ErrorRecord about; ///< op, sequence, dtype, numel: for errors
};

} // namespace pycomm::cuda
