#pragma once

#include <chrono>
#include <cstdint>

namespace pycomm {

using TimePoint = std::chrono::steady_clock::time_point;

/// The steady clock, or the simulation's clock on a thread that runs a simulation.
struct Clock {
  using duration = TimePoint::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = TimePoint;
  static constexpr bool is_steady = true;

  [[nodiscard]] static TimePoint now() noexcept {
    return simulated_ != nullptr ? *simulated_ : std::chrono::steady_clock::now();
  }
  /// From now on the calling thread reads `instant`, which stays alive until simulate(nullptr).
  static void simulate(const TimePoint* instant) noexcept {
    simulated_ = instant;
  }

 private:
  static inline thread_local const TimePoint* simulated_ = nullptr;
};

// Times that mean the same wherever they are used. One that only one place needs stands there.

/// A loss costs so much and no more: a sleep that an event ends is no longer, as a wake-up may be lost (a bug), and what was said is said
/// again after it (kSayAgain).
inline constexpr int kLongestSleepMs = 1000;
/// For one try to reach a process: long enough for a lost packet to be sent again. After such a silence a process counts as stopped, unless
/// the user gives another time.
inline constexpr int kOneTryMs = 3000;
/// For one step of a process that is reached, or of a disk: to answer, to say who it is, to read why this process gives up.
inline constexpr int kOneStepMs = 2000;
/// For what is nearly done: the reason why a wait for another process is over, which that process writes at about the same time; the
/// answer of one that has just given another one; the last steps of an end.
inline constexpr int kNearlyDoneMs = 300;
/// For telling another process why this one gives up, or refuses it.
inline constexpr int kSayWhyMs = 2 * kNearlyDoneMs;
/// For what is sure to come unless something has broken: a key of the store that exists, the memory of a first rank that is slow.
inline constexpr int kSureToComeMs = 10000;
/// Between two tries to reach a process, or two looks at how far it has come: at first, if the pauses grow.
inline constexpr int kShortPauseMs = 5;
/// The same at last, where a look costs the other side little.
inline constexpr int kLongPauseMs = 100;
/// How often a process looks for what another one may have left or written and no event tells: a notice, a port.
inline constexpr int kLookAgainMs = 500;
/// For how long what is over explains what comes after it.
inline constexpr std::chrono::seconds kRemembered{60};
/// A round trip on loopback, to a host on the same switch, or through a futex takes less: so long a thread polls before it sleeps, or sleeps
/// between two looks at what has no event. A longer wait is not worth a core.
inline constexpr std::chrono::microseconds kRoundTrip{50};

/// One absolute instant by which something must have ended. A duration becomes a Deadline once, when the operation
/// begins. Nested calls pass it on, so that several waits never add up to more than the whole.
class Deadline {
 public:
  /// Never expires.
  [[nodiscard]] static Deadline never() noexcept {
    return Deadline(TimePoint::max());
  }
  /// Expires `timeout_ms` milliseconds from now; zero or less has expired already.
  [[nodiscard]] static Deadline after(int64_t timeout_ms) noexcept {
    return after(timeout_ms, Clock::now());
  }
  [[nodiscard]] static Deadline after(int64_t timeout_ms, TimePoint now) noexcept {
    constexpr int64_t kForeverMs = 100LL * 365 * 24 * 3600 * 1000; // beyond this the sum could overflow
    return timeout_ms >= kForeverMs ? never() : Deadline(now + std::chrono::milliseconds(timeout_ms));
  }
  [[nodiscard]] static Deadline at(TimePoint instant) noexcept {
    return Deadline(instant);
  }

  [[nodiscard]] TimePoint instant() const noexcept {
    return instant_;
  }
  [[nodiscard]] bool isNever() const noexcept {
    return instant_ == TimePoint::max();
  }
  [[nodiscard]] bool expired(TimePoint now = Clock::now()) const noexcept {
    return !isNever() && now >= instant_;
  }
  /// Milliseconds left, rounded up, within [0, `limit_ms`]: an argument for poll() and epoll_wait().
  [[nodiscard]] int remainingMs(int limit_ms, TimePoint now = Clock::now()) const noexcept {
    if (isNever()) {
      return limit_ms;
    }
    if (now >= instant_) {
      return 0;
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(instant_ - now).count() + 1;
    return left < limit_ms ? static_cast<int>(left) : limit_ms;
  }

 private:
  explicit Deadline(TimePoint instant) noexcept : instant_(instant) {}
  TimePoint instant_;
};

} // namespace pycomm
