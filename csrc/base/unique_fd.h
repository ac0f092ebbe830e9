#pragma once

#include <unistd.h>

#include <cstdint>
#include <utility>

#include "base/fork_guard.h"

namespace pycomm {

/// Owns one file descriptor and closes it once. In a child of fork() the parent's descriptors may be closed already
/// (installForkGuard) and their numbers given out again: what was made before the fork is left alone there.
class UniqueFd {
 public:
  UniqueFd() = default;
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
      // First no longer guarded, then closed: the other way round the number could be somebody else's when a fork comes.
      unguardFd(fd_);
      ::close(fd_); // not retried on EINTR: on Linux the descriptor is gone either way (man 2 close)
    }
    fd_ = -1;
  }

 private:
  int fd_ = -1;
  uint32_t forks_ = 0;
};

} // namespace pycomm
