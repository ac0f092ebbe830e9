#include "c10d/process_end.h"

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "c10d/python_errors.h"
#include "engine/loop/callback_pool.h"

namespace pycomm {
namespace {

std::atomic<bool> g_process_ends{false};
thread_local bool t_ends_process = false;
thread_local int t_within = 0; ///< StayWithin's around this place
thread_local int t_awaited = 0; ///< AwaitedByEnd's, likewise

bool holdsGil() noexcept {
  return interpreterIsUsable() && PyGILState_Check() != 0;
}

bool mustStay() noexcept {
  return g_process_ends.load(std::memory_order_acquire) && !t_ends_process && t_awaited == 0 &&
      !CallbackPool::ownsThisThread() && !holdsGil();
}

} // namespace

void beginProcessEnd() noexcept {
  t_ends_process = true;
  g_process_ends.store(true, std::memory_order_release);
}

AwaitedByEnd::AwaitedByEnd() noexcept {
  ++t_awaited;
}

AwaitedByEnd::~AwaitedByEnd() {
  --t_awaited;
}

void stayIfProcessEnds() noexcept {
  if (t_within == 0) {
    stayBeforeGil();
  }
}

void stayBeforeGil() noexcept {
  while (mustStay()) {
    std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

bool mayTakeGil() noexcept {
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
