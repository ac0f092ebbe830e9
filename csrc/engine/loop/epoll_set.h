#pragma once

#include <sys/epoll.h>

#include <array>
#include <cstdint>
#include <unordered_map>

#include "base/unique_fd.h"
#include "engine/loop/loop.h"

namespace pycomm {

/// The descriptors that an event loop watches, and a signal with which other threads end its sleep.
///
/// One thread at a time calls what is here, but for signal() and sleep(): any thread.
class EpollSet final {
 public:
  /// Throws Error(TooManyFiles | SystemError).
  EpollSet();

  /// See Loop::watch. Throws as the constructor does.
  void watch(int fd, uint32_t events, Loop::Handler& handler);
  void unwatch(int fd) noexcept;

  /// Ends a wait or sleep, this one or the next.
  void signal() noexcept;

  /// What one wait has found.
  struct Ready {
    std::array<epoll_event, 64> events{};
    int count = 0;
  };
  /// Waits until a descriptor is ready or signal() was called, at most so long.
  void wait(Ready& ready, int timeout_ms) noexcept;
  /// Calls the handlers of what was found, each unless an earlier one has unwatched it; their exceptions go to them.
  void handle(const Ready& ready) noexcept;

  /// Waits as wait() does, but takes nothing: the next wait() finds it.
  void sleep(int timeout_ms) const noexcept;

 private:
  struct Watch {
    Loop::Handler* handler; ///< alive until unwatch(fd), by the contract of watch()
    uint32_t serial; ///< tells a descriptor from an earlier one of the same number
  };

  UniqueFd epoll_;
  UniqueFd signal_;
  std::unordered_map<int, Watch> watches_;
  uint32_t next_serial_ = 1;
};

} // namespace pycomm
