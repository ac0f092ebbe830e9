#include "base/wait_clock.h"

#include <chrono>

namespace pycomm {
namespace {

thread_local int64_t t_waited_ns = 0;
thread_local bool t_waits = false;

int64_t clockNs() noexcept {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

} // namespace

WaitClock::Instant WaitClock::now() noexcept {
  return {clockNs(), t_waited_ns, &t_waited_ns};
}

int64_t WaitClock::busyNs(const Instant& begin, const Instant& end) noexcept {
  const int64_t waited = begin.thread == end.thread ? end.waited_ns - begin.waited_ns : 0;
  return end.ns - begin.ns - waited;
}

WaitClock::Waiting::Waiting() noexcept : began_ns_(t_waits ? 0 : clockNs()) {
  t_waits = true;
}

WaitClock::Waiting::~Waiting() {
  if (began_ns_ != 0) {
    t_waited_ns += clockNs() - began_ns_;
    t_waits = false;
  }
}

} // namespace pycomm
