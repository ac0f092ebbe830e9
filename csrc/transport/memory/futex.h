#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>

namespace pycomm {

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free, "a futex is a word");

/// Sleeps while `word` has the value `seen`, for at most `timeout_us`. May return early for any reason, such as a
/// signal: the caller checks the word again. The word may be in memory that processes share.
inline void futexWait(const std::atomic<uint32_t>& word, uint32_t seen, int64_t timeout_us) noexcept {
  timespec pause{};
  pause.tv_sec = static_cast<time_t>(timeout_us / 1000000);
  pause.tv_nsec = static_cast<long>(timeout_us % 1000000) * 1000;
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &pause, nullptr, 0);
}

inline void futexWake(const std::atomic<uint32_t>& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

} // namespace pycomm
