#include "base/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <mutex>

namespace pycomm {
namespace {

// One bit a descriptor. Linux gives the lowest free number, so that only the first few pages of this are ever touched; a descriptor
// beyond it (the limit would have to be raised past a million) is not closed in children. Atomics and no lock: the child's handler
// runs in a copy of a process whose other threads stopped anywhere.
constexpr size_t kMaxFds = size_t{1} << 20;
std::array<std::atomic<uint64_t>, kMaxFds / 64> g_guarded{};
std::atomic<size_t> g_used_words{0};
std::atomic<uint32_t> g_forks{0};

// Shared by threads that make or close descriptors, exclusive around a fork(). Readers come first (glibc's default), so a thread may
// hold it twice.
pthread_rwlock_t g_fork_lock = PTHREAD_RWLOCK_INITIALIZER;

void beforeFork() noexcept {
  pthread_rwlock_wrlock(&g_fork_lock);
}

void inParent() noexcept {
  pthread_rwlock_unlock(&g_fork_lock);
}

// Only what a handler of fork() may call in a process with threads: close() (man 7 signal-safety).
void inChild() noexcept {
  // Not unlocked: glibc knows the writer by its kernel thread number, which is another one here. No other thread has it, or waits for it.
  g_fork_lock = PTHREAD_RWLOCK_INITIALIZER;
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
  // Fails only without memory; then children keep the descriptors, as they would of any library.
  std::call_once(once, [] { (void)::pthread_atfork(beforeFork, inParent, inChild); });
}

ForksHeldOff::ForksHeldOff() noexcept {
  const int error_number = errno;
  pthread_rwlock_rdlock(&g_fork_lock);
  errno = error_number;
}

ForksHeldOff::~ForksHeldOff() {
  const int error_number = errno;
  pthread_rwlock_unlock(&g_fork_lock);
  errno = error_number;
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
