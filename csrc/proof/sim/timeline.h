#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/deadline.h"

namespace pycomm::sim {

using Nanos = std::chrono::nanoseconds;
using std::chrono::microseconds;
using std::chrono::milliseconds;

/// Virtual time: runs events in the order of their instants, and equal instants in the order in which they were added.
/// While a Timeline exists, Clock::now() of its thread returns its time.
class Timeline {
 public:
  using Event = std::function<void()>;

  Timeline() {
    Clock::simulate(&now_);
  }
  ~Timeline() {
    Clock::simulate(nullptr);
  }
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  [[nodiscard]] TimePoint now() const noexcept {
    return now_;
  }
  /// Virtual time since the beginning.
  [[nodiscard]] Nanos elapsed() const noexcept {
    return now_ - TimePoint(kBeginning);
  }
  /// An instant in the past counts as now.
  void at(TimePoint instant, Event event);
  void after(Nanos delay, Event event) {
    at(now_ + delay, std::move(event));
  }
  /// Runs the next event. False if there is none, or none before `horizon`.
  [[nodiscard]] bool step(TimePoint horizon);
  [[nodiscard]] int64_t eventsRun() const noexcept {
    return events_run_;
  }

 private:
  static constexpr Nanos kBeginning = std::chrono::hours(1);

  struct Entry {
    TimePoint instant;
    int64_t serial;
    Event event;
  };
  static bool later(const Entry& a, const Entry& b) noexcept {
    return a.instant != b.instant ? a.instant > b.instant : a.serial > b.serial;
  }

  TimePoint now_{kBeginning};
  int64_t next_serial_ = 0;
  int64_t events_run_ = 0;
  std::vector<Entry> heap_;
};

} // namespace pycomm::sim
