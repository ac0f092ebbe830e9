#include "c10d/process_end.h"

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/wait_point.h"
#include "c10d/python_errors.h"
#include "engine/loop/callback_pool.h"

namespace pycomm {
namespace {

std::atomic<bool> g_process_ends{false};
thread_local bool t_ends_process = false;
thread_local int t_within = 0; ///< StayWithin's around this place

bool holdsGil() noexcept {
  return interpreterIsUsable() && PyGILState_Check() != 0;
}

bool mustStay() noexcept {
  return g_process_ends.load(std::memory_order_acquire) && !t_ends_process && !CallbackPool::ownsThisThread() &&
      !holdsGil();
}

void stay() noexcept {
  while (mustStay()) {
    std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

/// Taking the interpreter's lock is a wait like any other.
void beforeGil() noexcept {
  if (!holdsGil()) {
    beforeWait();
  }
}

} // namespace

void beginProcessEnd() noexcept {
  t_ends_process = true;
  g_process_ends.store(true, std::memory_order_release);
}

bool endsProcess() noexcept {
  return t_ends_process;
}

void stayIfProcessEnds() noexcept {
  if (t_within == 0) {
    stay();
  }
}

void stayBeforeGil() noexcept {
  beforeGil();
  stay();
}

bool mayTakeGil() noexcept {
  beforeGil();
  stayIfProcessEnds();
  return !mustStay() && interpreterIsUsable();
}

void StayWithin::enter() noexcept {
  stayIfProcessEnds();
  ++t_within;
}

void StayWithin::leave() noexcept {
  --t_within;
  stayIfProcessEnds();
}

} // namespace pycomm
