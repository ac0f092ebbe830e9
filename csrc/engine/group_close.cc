// How a group ends: it fails, is aborted, or closes.
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "base/fault_point.h"
#include "engine/closing.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

// How often fail() and close() look whether what they wait for is over; or whether the data loop has been stopped, so that nothing would ever
// say so.
constexpr std::chrono::microseconds kLookEnded{200};

/// What this rank tells those that have joined before it leaves.
ErrorRecord couldNotJoin(const ErrorRecord& failure, const GroupIdentity& identity) {
  ErrorRecord why;
  why.code = failure.code;
  identity.sign(why);
  why.summary = "it could not join: " + failure.summary;
  why.hint = "see why it could not join" + (failure.hint.empty() ? "" : ": " + failure.hint);
  return why;
}

template <typename Record>
void noteFailing(FlightLog& log, const Record& record) noexcept {
  try {
    log.failing(record());
  } catch (const std::bad_alloc&) { // of what is said about it
  }
}

} // namespace

Planes::Events Group::planeEvents() {
  Planes::Events events;
  // The log has the failure before anybody can know of it: what is issued by one who does is later than that, and who closes another
  // group because of it finds the reason there.
  events.failed = [this](const ErrorRecord& cause) {
    log_->reached(GroupPhase::Failed);
    noteFailing(*log_, [&] { return errorOf(cause, roster_.identity); });
    heard_at_ = planes_.control()->heardAt();
    failure_.set(cause);
  };
  events.ending = [this](const ErrorRecord& oldest, TimePoint issued_at) {
    failure_.setOldest(oldest, issued_at);
    noteFailing(*log_, [&] { return *failure(); });
  };
  events.ended = [this] {
    static_cast<void>(PYCOMM_FAULT("group.failed"));
    ended_.store(true, std::memory_order_release);
    engine_.recorder().failed(log_, *failure());
  };
  return events;
}

// Takes no memory that it cannot do without: some call it as they have none.
void Group::abort(const ErrorRecord& reason) noexcept {
  if (!engine_.belongsToThisProcess()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(close_mutex_);
  if (closed_) {
    return;
  }
  const ErrorRecord record = recordInAnyCase(roster_.identity, [&] {
    ErrorRecord signed_here = reason;
    roster_.identity.sign(signed_here);
    return signed_here;
  });
  const auto notice = [&]() noexcept { planes_.withControl([&](ControlPlane& control) { control.notice(record); }); };
  aborted_.store(true, std::memory_order_release);
  engine_.control().run(std::ref(notice));
}

bool Group::fail(const ErrorRecord& reason, Deadline deadline) {
  if (!failure_.happened()) {
    abort(reason);
  }
  while (!ended_.load(
      std::memory_order_acquire)) { // no condition variable: a child of fork() could not destroy one that is waited for
    if (deadline.expired()) {
      return false;
    }
    std::this_thread::sleep_for(kLookEnded);
  }
  return true;
}

Group::~Group() {
  close();
}

// Else the other ranks would read only that this one has left.
void Group::sayWhy() noexcept {
  try {
    if (failure_.happened()) {
      return;
    }
    std::optional<ErrorRecord> why;
    if (log_->reachedNs(GroupPhase::Ready) == 0) {
      why = log_->failure();
    }
    if (why) {
      why = couldNotJoin(*why, roster_.identity);
    } else if (const auto other = engine_.recorder().failedBeside(*log_)) {
      why = failedBeside(*other, roster_.identity);
    }
    if (why) {
      engine_.control().run([&] { planes_.withControl([&](ControlPlane& control) { control.leaving(*why); }); });
    }
  } catch (const std::exception&) { // no memory to say it
  }
}

// The calling thread waits for the end of the step.
void Group::runToItsEnd(Closing& closing, const Closing::Step& step) {
  const Closing::Body nobody_waits = [] {};
  const Closing::Body run = [&] { step.run(nobody_waits); };
  switch (step.on) {
    case Closing::Step::On::Caller:
      run();
      return;
    case Closing::Step::On::DataLoop:
      engine_.dataLoop().run(run);
      return;
    case Closing::Step::On::DataLoopUntilOver: {
      std::atomic<bool> over{false}; // no condition variable, as in fail()
      const Closing::Body say_so = [&] { over.store(true, std::memory_order_release); };
      engine_.dataLoop().run([&] { step.run(say_so); });
      while (!over.load(std::memory_order_acquire) && !engine_.dataLoop().ended()) {
        std::this_thread::sleep_for(kLookEnded);
      }
      return;
    }
    case Closing::Step::On::Control:
      engine_.control().run(run);
      return;
    case Closing::Step::On::ControlLinks:
      closeAllGently(closing.control_links);
      closing.control_links.clear();
      return;
  }
}

void Group::close() {
  if (!engine_.belongsToThisProcess()) { // nor would its mutex be safe: a thread of the parent may have held it
    planes_.abandon(); // see Engine::shutdown
    return;
  }
  const std::lock_guard<std::mutex> lock(close_mutex_);
  if (closed_) {
    return;
  }
  log_->reached(GroupPhase::Closed);
  static_cast<void>(PYCOMM_FAULT("group.close"));
  sayWhy();
  ErrorRecord reason = recordInAnyCase(roster_.identity, [&] {
    ErrorRecord shut;
    shut.code = ErrorCode::ShutDown;
    shut.rank = roster_.identity.jobRank();
    shut.summary = "The process group was closed while the operation was under way.";
    shut.hint = "wait for every operation before destroy_process_group()";
    return shut;
  });
  closed_ = true; // nothing from here on takes memory of this thread
  Closing closing(planes_, failure_.happened(), std::move(reason), [this] {
    for (const uint64_t watch : watches_) {
      engine_.localPeers().unwatch(watch);
    }
  });
  if (crowds_) {
    engine_.dataLoop().addCrowded(-1);
  }
  for (const Closing::Step& step : closing.steps()) {
    runToItsEnd(closing, step);
  }
  // The loops may still hold tasks of ours: after this they have run.
  engine_.dataLoop().run([] {});
  engine_.control().run([] {});
  leave(store_, roster_.claim);
}

} // namespace pycomm
