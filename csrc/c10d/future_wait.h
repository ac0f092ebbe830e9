#pragma once

#include <ATen/core/ivalue.h>

#include "base/deadline.h"

namespace pycomm {

/// Waits until the future has completed; false if the deadline has passed. On the main thread Python's signal handlers run meanwhile, and
/// their exceptions leave this function: torch's own waits are as long as the future takes. Call it without the interpreter's lock. The
/// future's value and error, and its streams, are torch's waitAndThrow()'s.
[[nodiscard]] bool awaitCompletion(c10::ivalue::Future& future, Deadline deadline);

} // namespace pycomm
