#pragma once

#include "base/deadline.h"
#include "base/error.h"

namespace pycomm::cuda {

/// One NcclComm::start(). `done` is guarded by the mutex of the communicator's state; the rest is written once.
class NcclOperation {
 public:
  bool done = false;
  Deadline deadline = Deadline::never();
  TimePoint issued_at;
  ErrorRecord about; ///< op, sequence, dtype, numel: for errors
};

} // namespace pycomm::cuda
