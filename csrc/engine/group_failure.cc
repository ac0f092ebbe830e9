#include "engine/group.h"

#include "engine/engine.h"
#include "engine/host/host_plane.h"
#include "engine/report/failure_text.h"

namespace pycomm {

void Group::onFailed(const ErrorRecord& cause) {
  log_->reached(GroupPhase::Failed); // before anybody can know: what is issued by one who does is later than this
  abort_.abort(cause);
  soon(engine_.lane(), [this, cause] { failOnLane(cause); });
}

// The closures are so small that a std::function needs no memory for them: nothing may fail before both planes have been told.
void Group::failOnLane(const ErrorRecord& cause) {
  const auto told = [this](const ErrorRecord& record) {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    if (!told_ || told_->elapsed_ms < record.elapsed_ms) { // of the two planes, the older operation
      told_ = record;
    }
  };
  if (data_ != nullptr) {
    data_->fail(cause, told);
  }
  const auto ended = [this] { engine_.recorder().failed(log_, *failure()); };
  if (host_ != nullptr) {
    host_->fail(cause, told, ended);
  } else {
    ended();
  }
}

// On either loop. The task is small, and the queue keeps its memory: so this needs none as a rule.
void Group::onThrown(const std::exception_ptr& exception) noexcept {
  try {
    engine_.control().post([this, exception] {
      if (control_ != nullptr) {
        control_->onThrown(exception);
      }
    });
  } catch (...) { // operations end at their deadline
  }
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
  engine_.control().run(Loop::owned(*this, [&] {
    if (control_ != nullptr) {
      control_->notice(record);
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
