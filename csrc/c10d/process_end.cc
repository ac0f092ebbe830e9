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

bool holdsGil() noexcept {
  return interpreterIsUsable() && PyGILState_Check() != 0;
}

} // namespace

void beginProcessEnd() noexcept {
  t_ends_process = true;
  g_process_ends.store(true, std::memory_order_release);
}

void stayIfProcessEnds() noexcept {
  if (!g_process_ends.load(std::memory_order_acquire) || t_ends_process || CallbackPool::ownsThisThread() ||
      holdsGil()) {
    return;
  }
  for (;;) {
    std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

} // namespace pycomm
