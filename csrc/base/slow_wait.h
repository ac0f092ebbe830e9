#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "base/deadline.h"

namespace pycomm {

/// When to log that something is still waited for: after 10 s, then every 60 s, at most 10 times.
class SlowWait {
 public:
  static constexpr std::chrono::seconds kFirst{10}; ///< of what goes on, strangers too, no line comes sooner
  static constexpr std::chrono::seconds kEvery{60};
  static constexpr int kMaxLines = 10;

  explicit SlowWait(TimePoint begin) : begin_(begin), next_(begin + kFirst) {}

  /// Returns the seconds waited so far if a line is due now, and counts that line as logged.
  [[nodiscard]] std::optional<int64_t> due(TimePoint now) noexcept {
    if (now < next_ || lines_ == kMaxLines) {
      return std::nullopt;
    }
    ++lines_;
    next_ = now + kEvery;
    return std::chrono::duration_cast<std::chrono::seconds>(now - begin_).count();
  }
  [[nodiscard]] int lines() const noexcept {
    return lines_;
  }

 private:
  TimePoint begin_;
  TimePoint next_;
  int lines_ = 0;
};

} // namespace pycomm
