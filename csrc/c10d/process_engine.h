#pragma once

#include <functional>
#include <memory>

#include "base/deadline.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "engine/join_abort.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

/// The engine of this process, made by the first call. Data loops belong to the process: a second engine would only compete for the
/// same cores, so this object is global on purpose. It is never destroyed (native threads may outlive static destructors);
/// shutdownProcessEngine joins its threads. A child of fork() gets an engine of its own.
[[nodiscard]] Engine& processEngine();

/// Group::join() on this process's engine. If a signal comes meanwhile, such as Ctrl-C, and Python's handler raises, the join ends on all
/// ranks with Error(Aborted) that names this one, and here with what the handler raised. For that a thread of its own joins while the main
/// thread runs handlers. On a thread that is not the main one, or if no thread can be started, it joins on the calling thread, and signals
/// wait. Call it without the interpreter's lock.
[[nodiscard]] std::shared_ptr<Group> joinGroup(Store& store, const Group::Config& config);

/// The same for another way to make a group: runs `join`, which throws what it cannot do. `meeting` is for the error.
void joinInterruptibly(const RendezvousConfig& meeting, const std::function<void(JoinAbort& abort)>& join);

/// Runs `body` on a thread of that name while the main thread runs Python's signal handlers. If one raises, `interrupt` is to end the body
/// soon, and its exception leaves this. On a thread that is not the main one, or if no thread can be started, the body runs on the calling
/// thread, and signals wait. Else throws what the body does. Call it without the interpreter's lock.
void runInterruptibly(const char* thread, const std::function<void()>& body, const std::function<void()>& interrupt);

/// Joins the native threads, if there are any. False if a callback has not returned by the deadline: call it again then.
bool shutdownProcessEngine(Deadline deadline);

} // namespace pycomm
