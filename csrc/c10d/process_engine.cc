#include "c10d/process_engine.h"

#include <unistd.h>

#include <exception>
#include <future>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/native_thread.h"
#include "base/wait_point.h"
#include "c10d/interruptible.h"
#include "c10d/python_errors.h"

namespace pycomm {
namespace {
LeafMutex g_mutex; ///< guards g_engine
Engine* g_engine = nullptr;

ErrorRecord interrupted(const RendezvousConfig& meeting) {
  ErrorRecord record;
  record.code = ErrorCode::Aborted;
  record.rank = record.peer = meeting.job.of(meeting.rank);
  record.host = record.peer_host = localHostName();
  record.summary = "Rank " + std::to_string(record.rank) + " on " + record.host +
      " was interrupted by a signal, such as Ctrl-C, while the group was made";
  record.hint = "start the job again";
  return record;
}

} // namespace

Engine& processEngine() {
  const std::lock_guard lock(g_mutex);
  if (g_engine == nullptr || !g_engine->belongsToThisProcess()) {
    g_engine = new Engine();
  }
  return *g_engine;
}

std::shared_ptr<Group> joinGroup(Store& store, const Group::Config& config) {
  Engine& engine = processEngine();
  std::shared_ptr<Group> group;
  joinInterruptibly(config.rendezvous, [&](JoinAbort& abort) { group = Group::join(engine, store, config, abort); });
  return group;
}

void joinInterruptibly(const RendezvousConfig& meeting, const std::function<void(JoinAbort& abort)>& join) {
  JoinAbort abort;
  runInterruptibly("pycomm-join", [&] { join(abort); }, [&] { abort.abort(interrupted(meeting)); });
}

void runInterruptibly(
    const char* thread_name,
    const std::function<void()>& body,
    const std::function<void()>& interrupt) {
  if (!onMainThread()) {
    body();
    return;
  }
  const auto running = std::make_shared<std::packaged_task<void()>>(body);
  std::future<void> joined = running->get_future();
  std::thread thread;
  try {
    thread =
        startNativeThread(thread_name, [running] { (*running)(); }, SignalMask::AsCaller); // a store may be Python's
  } catch (const std::exception&) { // then signals have to wait
    body();
    return;
  }
  const pid_t self = ::getpid();
  std::exception_ptr raised;
  bool aborted = false;
  for (bool over = false; !over;) {
    over = joined.wait_for(Interruptible::kEvery) == std::future_status::ready; // signals are looked for once more then
    try {
      checkSignals();
    } catch (...) {
      raised = raised ? raised : std::current_exception();
    }
    if (raised && !aborted) {
      try {
        interrupt();
        aborted = true;
      } catch (const std::bad_alloc&) { // then in 100 ms
      }
    }
    if (::getpid() != self) { // a handler has forked, and this is the child, which has no such thread
      thread.detach();
      throw Error(
          ErrorCode::Forked,
          "The process was forked by a signal handler while it waited for other ranks.",
          "call exec() in the child");
    }
  }
  thread.join();
  if (raised) {
    std::rethrow_exception(raised);
  }
  joined.get();
}

bool shutdownProcessEngine(Deadline deadline) {
  Engine* engine = nullptr;
  {
    const std::lock_guard lock(g_mutex);
    engine = g_engine;
  }
  return engine == nullptr || engine->shutdown(deadline);
}

} // namespace pycomm
