#pragma once

#include <unistd.h>

#include <cstdint>
#include <utility>

#include "base/fork_guard.h"

namespace pycomm {

/// Owns one file descriptor and closes it once. In a child of fork(), the parent's descriptors may be closed already
/// (installForkGuard) and their numbers reused. So the child does not close descriptors that were made before the fork.
class UniqueFd {
 public:
  /// Owns the descriptor that `make` returns; empty for -1. No fork() can come between the system call that makes the
  /// descriptor and its registration with the fork guard. `make` must not wait; its errno is kept.
  template <typename Make>
  [[nodiscard]] static UniqueFd from(const Make& make) {
    const ForksHeldOff held_off;
    return UniqueFd(make());
  }

  UniqueFd() = default;
  /// For a descriptor that a fork() may have copied already; use from() for a new one.
  explicit UniqueFd(int fd) noexcept : fd_(fd), forks_(forkCount()) {
    guardFd(fd_);
  }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), forks_(other.forks_) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
      forks_ = other.forks_;
    }
    return *this;
  }
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd() {
    reset();
  }

  [[nodiscard]] int get() const noexcept {
    return fd_;
  }
  [[nodiscard]] explicit operator bool() const noexcept {
    return fd_ >= 0;
  }
  [[nodiscard]] int release() noexcept {
    unguardFd(fd_);
    return std::exchange(fd_, -1);
  }
  void reset() noexcept {
    if (fd_ >= 0 && forks_ == forkCount()) {
      const ForksHeldOff held_off; // otherwise a child would keep a descriptor that is unguarded but still open
      unguardFd(fd_);
      ::close(fd_); // not retried on EINTR: on Linux the descriptor is closed either way (man 2 close)
    }
    fd_ = -1;
  }

 private:
  int fd_ = -1;
  uint32_t forks_ = 0;
};

} // namespace pycomm
