// How a group ends: it fails, is aborted, or closes.
#include <chrono>
#include <future>
#include <utility>

#include "base/fault_point.h"
#include "engine/closing.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

// How often close() looks whether the lane has been stopped, so that nothing would ever report that the links are down.
constexpr std::chrono::milliseconds kLook{50};

template <typename Record>
void noteFailing(FlightLog& log, const Record& record) noexcept {
  try {
    log.failing(record());
  } catch (const std::bad_alloc&) { // of what is said about it
  }
}

/// Runs the steps of closing on the engine's loops. The calling thread waits for each.
class StepsOfEngine final : public Closing::Steps {
 public:
  StepsOfEngine(Engine& engine, const std::vector<uint64_t>& watches) : engine_(engine), watches_(watches) {}

  void onLane(Closing::Body body, Closing::Body then) override {
    engine_.lane().run(body);
    then();
  }
  void onLaneUntil(std::function<void(Closing::Body over)> body, Closing::Body then) override {
    std::promise<void> over;
    const std::future<void> is_over = over.get_future();
    engine_.lane().post([&] { body([&] { over.set_value(); }); });
    while (is_over.wait_for(kLook) != std::future_status::ready && !engine_.lane().ended()) {
    }
    then();
  }
  void onControl(Closing::Body body, Closing::Body then) override {
    engine_.control().run(body);
    then();
  }
  void leaveControl() override {
    for (const uint64_t watch : watches_) {
      engine_.hostMates().unwatch(watch);
    }
  }
  void closeGently(std::vector<std::unique_ptr<Link>> links, Closing::Body then) override {
    closeAllGently(links);
    links.clear();
    then();
  }

 private:
  Engine& engine_;
  const std::vector<uint64_t>& watches_; ///< the group's
};

} // namespace

Planes::Events Group::planeEvents() {
  Planes::Events events;
  // The log has the failure before anybody can know of it: what is issued by one who does is later than that, and who closes another
  // group because of it finds the reason there.
  events.failed = [this](const ErrorRecord& cause) {
    log_->reached(GroupPhase::Failed);
    noteFailing(*log_, [&] { return errorOf(cause, roster_.identity); });
    failure_.set(cause);
  };
  events.ending = [this](const ErrorRecord& oldest) {
    failure_.setOldest(oldest);
    noteFailing(*log_, [&] { return *failure(); });
  };
  events.ended = [this] {
    static_cast<void>(PYCOMM_FAULT("group.failed"));
    engine_.recorder().failed(log_, *failure());
  };
  return events;
}

void Group::abort(const ErrorRecord& reason) {
  if (!engine_.belongsToThisProcess()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(close_mutex_);
  if (closed_) {
    return;
  }
  aborted_.store(true, std::memory_order_release);
  ErrorRecord record = reason;
  roster_.identity.sign(record);
  engine_.control().run(Loop::owned(planes_, [&] {
    if (ControlPlane* const control = planes_.control()) {
      control->notice(record);
    }
  }));
}

Group::~Group() {
  close();
}

// Else the other ranks would read only that this one has left.
void Group::sayWhy() noexcept {
  try {
    const auto other = failure_.happened() ? std::nullopt : engine_.recorder().failedBeside(*log_);
    if (other) {
      const ErrorRecord why = failedBeside(*other, roster_.identity);
      engine_.control().run(Loop::owned(planes_, [&] {
        if (ControlPlane* const control = planes_.control()) {
          control->leaving(why);
        }
      }));
    }
  } catch (const std::exception&) { // no memory to say it
  }
}

void Group::close() {
  if (!engine_.belongsToThisProcess()) { // nor would its mutex be safe: a thread of the parent may have held it
    planes_.abandon(); // see Engine::shutdown
    return;
  }
  const std::lock_guard<std::mutex> lock(close_mutex_);
  if (std::exchange(closed_, true)) {
    return;
  }
  log_->reached(GroupPhase::Closed);
  static_cast<void>(PYCOMM_FAULT("group.close"));
  sayWhy();
  if (crowds_) {
    engine_.lane().addCrowded(-1);
  }
  ErrorRecord reason;
  reason.code = ErrorCode::ShutDown;
  reason.rank = roster_.identity.jobRank();
  reason.summary = "The process group was closed while the operation was under way.";
  reason.hint = "wait for every operation before destroy_process_group()";
  StepsOfEngine steps(engine_, watches_);
  Closing(planes_, steps, std::move(reason)).begin(failure_.happened(), [] {});
  // The loops may still hold tasks of ours: after this they have run.
  engine_.lane().run([] {});
  engine_.control().run([] {});
  leave(store_, roster_.claim);
}

} // namespace pycomm
