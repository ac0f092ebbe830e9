#include "base/fork_guard.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>

namespace pycomm {
namespace {

// One bit per descriptor. Linux assigns the lowest free number, so only the first few pages of this are ever touched. A
// descriptor beyond it (the limit would have to be raised past a million) is not closed in children. Atomics and no
// lock: the child's handler runs in a copy of a process whose other threads may have stopped at any instruction.
constexpr size_t kMaxFds = size_t{1} << 20;
std::array<std::atomic<uint64_t>, kMaxFds / 64> g_guarded{};
std::atomic<size_t> g_used_words{0};
std::atomic<uint32_t> g_forks{0};

// Atomics and no lock here too: a thread owns a lock, and the child's thread is a different one. Both waits last a few
// system calls.
std::atomic<uint32_t> g_holders{0}; // threads inside of a ForksHeldOff
std::atomic<uint32_t> g_forking{0}; // threads between beforeFork() and inParent()
std::atomic<uint32_t> g_both{0}; // threads that are both
thread_local uint32_t t_held = 0; // a thread may hold forks off twice, also while another one waits to fork

void waitUntilZero(const std::atomic<uint32_t>& count) noexcept {
  while (count.load() != 0) {
    sched_yield();
  }
}

// A thread that delays forks itself waits for the other holders, except for those that fork as well: they wait for it.
void beforeFork() noexcept {
  const bool holds = t_held > 0;
  g_both.fetch_add(holds ? 1 : 0);
  g_forking.fetch_add(1);
  while (g_holders.load() > (holds ? g_both.load() : 0)) {
    sched_yield();
  }
}

void inParent() noexcept {
  g_both.fetch_sub(t_held > 0 ? 1 : 0);
  g_forking.fetch_sub(1);
}

// Calls only functions that a handler of fork() may call in a process with threads: close() (man 7 signal-safety).
void inChild() noexcept {
  g_forking.store(0); // no other thread is here
  g_both.store(0);
  g_holders.store(t_held > 0 ? 1 : 0);
  g_forks.fetch_add(1, std::memory_order_relaxed);
  const size_t used = g_used_words.load(std::memory_order_relaxed);
  for (size_t word = 0; word < used; ++word) {
    uint64_t bits = g_guarded[word].exchange(0, std::memory_order_relaxed);
    for (size_t bit = 0; bits != 0; ++bit, bits >>= 1) {
      if ((bits & 1) != 0) {
        ::close(static_cast<int>(word * 64 + bit));
      }
    }
  }
}

} // namespace

uint32_t forkCount() noexcept {
  return g_forks.load(std::memory_order_relaxed);
}

void installForkGuard() noexcept {
  static std::once_flag once;
  // Fails only if memory runs out; then children keep the descriptors, as they do with any library.
  std::call_once(once, [] { (void)::pthread_atfork(beforeFork, inParent, inChild); });
}

ForksHeldOff::ForksHeldOff() noexcept {
  if (++t_held > 1) {
    return;
  }
  g_holders.fetch_add(1);
  while (g_forking.load() != 0) { // the fork goes first
    g_holders.fetch_sub(1);
    waitUntilZero(g_forking);
    g_holders.fetch_add(1);
  }
}

ForksHeldOff::~ForksHeldOff() {
  if (--t_held == 0) {
    g_holders.fetch_sub(1);
  }
}

void guardFd(int fd) noexcept {
  const size_t word = static_cast<size_t>(fd) / 64;
  if (fd < 0 || word >= g_guarded.size()) {
    return;
  }
  g_guarded[word].fetch_or(uint64_t{1} << (fd % 64), std::memory_order_relaxed);
  size_t used = g_used_words.load(std::memory_order_relaxed);
  while (used <= word && !g_used_words.compare_exchange_weak(used, word + 1, std::memory_order_relaxed)) {
  }
}

void unguardFd(int fd) noexcept {
  const size_t word = static_cast<size_t>(fd) / 64;
  if (fd >= 0 && word < g_guarded.size()) {
    g_guarded[word].fetch_and(~(uint64_t{1} << (fd % 64)), std::memory_order_relaxed);
  }
}

} // namespace pycomm
