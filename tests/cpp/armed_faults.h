#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "base/deadline.h"
#include "base/fault_point.h"

namespace pycomm::testing {

/// Fault points that are armed while it exists. What they hold goes on at its end. The first of them has to strike meanwhile.
class ArmedFaults {
 public:
  explicit ArmedFaults(const std::string& spec) {
    armFaultPoints(spec);
  }
  ~ArmedFaults() {
    EXPECT_GT(strikes(), 0) << faultPointTallies().front().point;
    armFaultPoints("");
  }
  ArmedFaults(const ArmedFaults&) = delete;
  ArmedFaults& operator=(const ArmedFaults&) = delete;

  /// How often the first of them has struck.
  [[nodiscard]] static int64_t strikes() {
    return faultPointTallies().front().strikes;
  }
  /// Waits for that: a thread is in its delay, or held by it.
  static void waitUntilStruck(int64_t times = 1) {
    waitUntil([times] { return strikes() >= times; });
  }
  /// Waits until somebody has been at the last of them, which need not strike.
  static void waitUntilVisited() {
    waitUntil([] { return faultPointTallies().back().visits > 0; });
  }

 private:
  template <typename Condition>
  static void waitUntil(const Condition& condition) {
    const Deadline most = Deadline::after(60000);
    while (!condition()) {
      if (most.expired()) {
        ADD_FAILURE() << "no thread came to the fault point";
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
};

} // namespace pycomm::testing
