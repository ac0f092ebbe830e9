#include "allocations.h"

#include <malloc.h>
#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace pycomm::testing {
namespace {

thread_local int64_t allocations_left = 0; // before one fails
thread_local int64_t left_then = 0; // the same of the next one
thread_local int failed = 0;
thread_local std::atomic<bool>* hold_begun = nullptr;
thread_local const std::atomic<bool>* hold_until = nullptr;
thread_local int64_t held = 0;
std::atomic<size_t> watched_nbytes{SIZE_MAX};
std::atomic<void (*)()> on_freed{nullptr};

[[gnu::noinline]] void* allocate(size_t nbytes) { // inlined, it would be taken for a mistake beside free()
  if (allocations_left > 0 && --allocations_left == 0) {
    ++failed;
    allocations_left = std::exchange(left_then, 0);
    throw std::bad_alloc();
  }
  if (std::atomic<bool>* const begun = std::exchange(hold_begun, nullptr)) {
    for (begun->store(true); !hold_until->load();) {
      ::sched_yield();
    }
  }
  if (void* const memory = std::malloc(std::max<size_t>(nbytes, 1))) {
    held += static_cast<int64_t>(::malloc_usable_size(memory));
    return memory;
  }
  throw std::bad_alloc();
}

[[gnu::noinline]] void release(void* memory) noexcept {
  const size_t nbytes = ::malloc_usable_size(memory);
  held -= static_cast<int64_t>(nbytes);
  if (void (*const freed)() = nbytes >= watched_nbytes.load() ? on_freed.load() : nullptr) {
    freed();
  }
  std::free(memory);
}

} // namespace

void failAllocation(int64_t nth, int64_t second) noexcept {
  allocations_left = nth;
  left_then = second;
  failed = 0;
}

int failedAllocations() noexcept {
  return failed;
}

void holdNextAllocation(std::atomic<bool>& begun, const std::atomic<bool>& go) noexcept {
  hold_begun = &begun;
  hold_until = &go;
}

int64_t heldNbytes() noexcept {
  return held;
}

void watchFrees(size_t nbytes, void (*freed)()) noexcept {
  on_freed.store(freed);
  watched_nbytes.store(freed == nullptr ? SIZE_MAX : nbytes);
}

} // namespace pycomm::testing

void* operator new(size_t nbytes) {
  return pycomm::testing::allocate(nbytes);
}
void* operator new[](size_t nbytes) {
  return pycomm::testing::allocate(nbytes);
}
// A sanitizer has its own of these, which do not call those above.
void* operator new(size_t nbytes, const std::nothrow_t& /*tag*/) noexcept {
  try {
    return pycomm::testing::allocate(nbytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new[](size_t nbytes, const std::nothrow_t& /*tag*/) noexcept {
  try {
    return pycomm::testing::allocate(nbytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept {
  pycomm::testing::release(memory);
}
void operator delete[](void* memory) noexcept {
  pycomm::testing::release(memory);
}
void operator delete(void* memory, size_t) noexcept {
  pycomm::testing::release(memory);
}
void operator delete[](void* memory, size_t) noexcept {
  pycomm::testing::release(memory);
}
