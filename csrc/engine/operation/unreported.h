#pragma once

#include <exception>
#include <utility>

#include "base/deadline.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// The first exception that there was no memory to report. Each kSayAgain its owner's tick tries again. Thread: the owner's loop.
class Unreported {
 public:
  /// `peer`: the rank whose link it comes from; -1 if from none.
  void keep(int peer, const std::exception_ptr& exception) noexcept {
    if (!exception_) { // the first is the cause
      peer_ = peer;
      exception_ = exception;
    }
    due_ = Clock::now() + kSayAgain;
  }
  /// TimePoint::max() if there is none.
  [[nodiscard]] TimePoint due() const noexcept {
    return due_;
  }
  /// Calls `report(peer, exception)`, which may keep() it, if that is due.
  template <typename Report>
  void tryAgain(TimePoint now, const Report& report) noexcept {
    if (due_ <= now) {
      due_ = TimePoint::max();
      report(peer_, std::exchange(exception_, nullptr));
    }
  }

 private:
  int peer_ = -1;
  std::exception_ptr exception_;
  TimePoint due_ = TimePoint::max();
};

} // namespace pycomm
