#include "engine/group.h"

#include "engine/engine.h"
#include "engine/report/failure_text.h"

namespace pycomm {

Planes::Events Group::planeEvents() {
  Planes::Events events;
  events.failed = [this](const ErrorRecord& cause) {
    log_->reached(GroupPhase::Failed); // before anybody can know: what is issued by one who does is later than this
    abort_.abort(cause);
  };
  events.ending = [this](const ErrorRecord& oldest) {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    if (!told_ || told_->elapsed_ms < oldest.elapsed_ms) { // of the two planes, the older operation
      told_ = oldest;
    }
  };
  events.ended = [this] { engine_.recorder().failed(log_, *failure()); };
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
  ErrorRecord record = reason;
  record.rank = identity_.rank;
  record.host = identity_.host(identity_.rank);
  record.group = identity_.name;
  engine_.control().run(Loop::owned(planes_, [&] {
    if (ControlPlane* const control = planes_.control()) {
      control->notice(record);
    }
  }));
}

std::optional<ErrorRecord> Group::failure() const {
  if (!abort_.aborted()) {
    return std::nullopt;
  }
  {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    if (told_) {
      return told_;
    }
  }
  return errorOf(abort_.reason(), identity_);
}

} // namespace pycomm
