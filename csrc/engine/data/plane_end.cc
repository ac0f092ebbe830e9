#include "engine/data/plane_end.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

// How long to wait after a goodbye for the peer to read it.
constexpr std::chrono::milliseconds kGoodbye(20);
// How long to wait for room for it, if the peer has yet to read what came before.
constexpr std::chrono::milliseconds kLastWords(1500);
// After a failure, how long bulk links stay open at the least.
constexpr std::chrono::milliseconds kNews(50);

} // namespace

bool PlaneEnd::fail(const ErrorRecord& cause, TimePoint now) noexcept {
  if (failure_) {
    return false;
  }
  failure_ = recordInAnyCase(identity_, [&] { return cause; });
  failed_at_ = now;
  return true;
}

void PlaneEnd::close(const ErrorRecord& reason, std::function<void()> closed, TimePoint now) noexcept {
  closing_ = recordInAnyCase(identity_, [&] { return reason; });
  closed_ = std::move(closed);
  ends_at_ = now;
  if (failure_) {
    // News travels over other ranks' control links; a link that ends before it has arrived looks like a death.
    ends_at_ = std::max(ends_at_, failed_at_ + kNews);
  }
}

void PlaneEnd::goodbyesQueued(bool unsent, TimePoint now) noexcept {
  ends_at_ = now + (unsent ? kLastWords : kGoodbye);
}

void PlaneEnd::goodbyesSaid(TimePoint now) noexcept {
  ends_at_ = now + kGoodbye;
}

std::function<void()> PlaneEnd::end() noexcept {
  ends_at_ = TimePoint::max();
  if (!failure_) {
    failure_ = std::move(*closing_);
  }
  return std::exchange(closed_, nullptr);
}

void PlaneEnd::endAtOnce(Operation& operation) const noexcept {
  operation.finish(recordInAnyCase(identity_, [&] {
    ErrorRecord closed;
    closed.code = ErrorCode::ShutDown;
    closed.summary = "The process group is closed.";
    const ErrorRecord& cause = failure_ ? *failure_ : (closing_ ? *closing_ : closed);
    ErrorRecord record = errorOf(operation, cause, identity_);
    record.bytes_done = 0;
    record.bytes_total = 0;
    if (const PreparedSchedule* schedule = operation.request().schedule.get()) { // null: from any rank
      for (const Edge& edge : schedule->incoming) {
        record.bytes_total += edge.nbytes;
      }
    }
    record.phase = record.phase.known() ? record.phase : ErrorPhase::NotStarted;
    return record;
  }));
}

} // namespace pycomm
