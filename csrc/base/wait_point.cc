#include "base/wait_point.h"

#include <atomic>

namespace pycomm {

#ifdef PYCOMM_FAULT_POINTS

namespace {

std::atomic<void (*)() noexcept> g_observer{nullptr};

} // namespace

void beforeWait() noexcept {
  if (auto* const observer = g_observer.load(std::memory_order_acquire)) {
    observer();
  }
}

void observeWaits(void (*observer)() noexcept) noexcept {
  g_observer.store(observer, std::memory_order_release);
}

#else

void beforeWait() noexcept {}

void observeWaits(void (*)() noexcept) noexcept {}

#endif

} // namespace pycomm
