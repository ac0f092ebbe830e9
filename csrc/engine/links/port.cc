#include "engine/links/port.h"

#include <sys/epoll.h>

#include <utility>

namespace pycomm {
namespace {

void unwatchFd(Loop& loop, int& watched) noexcept {
  if (watched >= 0) {
    loop.unwatch(std::exchange(watched, -1));
  }
}

} // namespace

// Of a shared link always: the peer's end must be noticed, and bytes of its bell must not pile up.
uint32_t OutPort::events() const noexcept {
  const auto room = static_cast<uint32_t>(link->roomEvent());
  if (shared != nullptr) {
    return reader_gone ? 0U : room;
  }
  return state_ == State::Open ? 0U : room;
}

void OutPort::watch(Loop& loop) {
  if (hung_up_) {
    return;
  }
  const int fd = link->fd();
  const uint32_t wanted = events();
  if (fd == watched_ && wanted == watched_events_) {
    return;
  }
  if (fd != watched_) {
    unwatch(loop);
  }
  loop.watch(fd, wanted, *this);
  watched_ = fd;
  watched_events_ = wanted;
}

void OutPort::unwatch(Loop& loop) noexcept {
  unwatchFd(loop, watched_);
}

// The peer never reads much of this connection, so it always has room: the loop returns at once to bytes that the kernel no longer has.
uint32_t InPort::events() const noexcept {
  return link->buffered() || link->unsent() ? EPOLLIN | EPOLLOUT : EPOLLIN;
}

void InPort::watch(Loop& loop) {
  const int fd = link->fd();
  const uint32_t wanted = events();
  if (ended || (fd == watched_ && wanted == watched_events_)) {
    return;
  }
  if (fd != watched_) {
    unwatch(loop);
  }
  loop.watch(fd, wanted, *this);
  watched_ = fd;
  watched_events_ = wanted;
}

void InPort::unwatch(Loop& loop) noexcept {
  unwatchFd(loop, watched_);
}

} // namespace pycomm
