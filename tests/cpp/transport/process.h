#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <new>
#include <utility>

#include "base/deadline.h"

namespace pycomm::testing {

/// A forked child that runs `body` and exits with 0 if it returned true. The destructor kills what is left of it.
class Process {
 public:
  explicit Process(const std::function<bool()>& body) : pid_(::fork()) {
    if (pid_ == 0) {
      bool good = false;
      try {
        good = body();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "child: %s\n", error.what());
      }
      ::_exit(good ? 0 : 1);
    }
  }
  Process(Process&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    if (pid_ > 0) {
      kill();
      (void)join();
    }
  }

  [[nodiscard]] pid_t pid() const {
    return pid_;
  }
  void kill() const {
    if (pid_ > 0) {
      (void)::kill(pid_, SIGKILL);
    }
  }
  /// Whether it still runs after `timeout_ms`.
  [[nodiscard]] bool runsOn(int timeout_ms) const {
    siginfo_t ended{};
    for (const Deadline deadline = Deadline::after(timeout_ms); !deadline.expired();) {
      if (::waitid(P_PID, static_cast<id_t>(pid_), &ended, WEXITED | WNOHANG | WNOWAIT) != 0 || ended.si_pid != 0) {
        return false;
      }
      (void)::poll(nullptr, 0, 1);
    }
    return true;
  }
  /// True if it exited with 0. Waits at most `timeout_ms`, then kills it.
  [[nodiscard]] bool join(int timeout_ms = 60000) {
    const Deadline deadline = Deadline::after(timeout_ms);
    int status = -1;
    while (pid_ > 0 && ::waitpid(pid_, &status, WNOHANG) == 0) {
      if (deadline.expired()) {
        kill();
        (void)::waitpid(pid_, &status, 0);
        break;
      }
      (void)::poll(nullptr, 0, 1);
    }
    pid_ = -1;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

 private:
  pid_t pid_ = -1;
};

/// A number that threads and forked children of its maker share, 0 until raised.
class SharedFlag {
 public:
  SharedFlag()
      : value_(new (::mmap(nullptr, sizeof *value_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
                   std::atomic<int64_t>(0)) {}
  ~SharedFlag() {
    (void)::munmap(value_, sizeof *value_);
  }
  SharedFlag(const SharedFlag&) = delete;
  SharedFlag& operator=(const SharedFlag&) = delete;

  void raise(int64_t value = 1) {
    value_->store(value);
  }
  [[nodiscard]] int64_t value() const {
    return value_->load();
  }
  /// False if nobody raised it for `timeout_ms`.
  [[nodiscard]] bool wait(int timeout_ms = 60000) const {
    for (const Deadline deadline = Deadline::after(timeout_ms); value() == 0;) {
      if (deadline.expired()) {
        return false;
      }
      (void)::poll(nullptr, 0, 1);
    }
    return true;
  }

 private:
  std::atomic<int64_t>* value_; ///< in memory of our own mapping, until the destructor
};

} // namespace pycomm::testing
