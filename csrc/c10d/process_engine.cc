#include "c10d/process_engine.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/native_thread.h"
#include "c10d/python_errors.h"

namespace pycomm {
namespace {
std::mutex g_mutex; ///< guards g_engine
Engine* g_engine = nullptr;

constexpr std::chrono::milliseconds kSignalsEvery{100};

/// A join on a thread of its own, and what it came to.
class Joining {
 public:
  void run(Engine& engine, Store& store, const Group::Config& config, JoinAbort& abort) noexcept {
    std::shared_ptr<Group> group;
    std::exception_ptr error;
    try {
      group = Group::join(engine, store, config, abort);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    group_ = std::move(group);
    error_ = error;
    over_ = true;
    changed_.notify_all();
  }
  /// Whether it is over.
  [[nodiscard]] bool waitFor(std::chrono::milliseconds time) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, time, [&] { return over_; });
  }
  /// Once it is over.
  [[nodiscard]] std::shared_ptr<Group> result() {
    if (error_) {
      std::rethrow_exception(error_);
    }
    return std::move(group_);
  }

 private:
  std::mutex mutex_; ///< guards the others
  std::condition_variable changed_;
  bool over_ = false;
  std::shared_ptr<Group> group_;
  std::exception_ptr error_;
};

ErrorRecord interrupted(const RendezvousConfig& meeting) {
  ErrorRecord record;
  record.code = ErrorCode::Aborted;
  record.rank = record.peer = meeting.rank;
  record.host = record.peer_host = localHostName();
  record.summary = "Rank " + std::to_string(meeting.rank) + " on " + record.host +
      " was interrupted by a signal, such as Ctrl-C, while the group was made.";
  record.hint = "start the job again";
  return record;
}

} // namespace

Engine& processEngine() {
  const std::lock_guard<std::mutex> lock(g_mutex);
  if (g_engine == nullptr || !g_engine->belongsToThisProcess()) {
    g_engine = new Engine();
  }
  return *g_engine;
}

std::shared_ptr<Group> joinGroup(Store& store, const Group::Config& config) {
  Engine& engine = processEngine();
  if (!onMainThread()) {
    return Group::join(engine, store, config);
  }
  JoinAbort abort;
  const auto joining = std::make_shared<Joining>();
  std::thread thread;
  try {
    thread = startNativeThread("pycomm-join", [&, joining] { joining->run(engine, store, config, abort); });
  } catch (const std::exception&) { // then signals have to wait
    return Group::join(engine, store, config);
  }
  const pid_t self = ::getpid();
  std::exception_ptr raised;
  for (bool over = false; !over;) {
    over = joining->waitFor(kSignalsEvery); // and looks once more when it is over
    try {
      checkSignals();
    } catch (...) {
      if (!raised) {
        raised = std::current_exception();
        abort.abort(interrupted(config.rendezvous));
      }
    }
    if (::getpid() != self) { // a handler has forked, and this is the child, which has no such thread
      thread.detach();
      throw Error(ErrorCode::Forked, "The process was forked by a signal handler while it made a group.", "exec there");
    }
  }
  thread.join();
  if (raised) {
    std::rethrow_exception(raised);
  }
  return joining->result();
}

bool shutdownProcessEngine(Deadline deadline) {
  Engine* engine = nullptr;
  {
    const std::lock_guard<std::mutex> lock(g_mutex);
    engine = g_engine;
  }
  return engine == nullptr || engine->shutdown(deadline);
}

} // namespace pycomm
