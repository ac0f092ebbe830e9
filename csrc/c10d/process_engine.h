#pragma once

#include "base/deadline.h"
#include "engine/engine.h"

namespace pycomm {

/// The engine of this process, made by the first call. Lanes belong to the process: a second engine would only compete for the
/// same cores, so this object is global on purpose. It is never destroyed (native threads may outlive static destructors);
/// shutdownProcessEngine joins its threads. A child of fork() gets an engine of its own.
[[nodiscard]] Engine& processEngine();

/// Joins the native threads, if there are any. True if all ended by the deadline.
bool shutdownProcessEngine(Deadline deadline);

} // namespace pycomm
