#include "engine/links/port.h"

#include <sys/epoll.h>

#include <utility>

namespace pycomm {

void PortWatch::set(Loop& loop, int fd, uint32_t events, Loop::Handler& port) {
  if (fd == fd_ && events == events_) {
    return;
  }
  if (fd != fd_) {
    end(loop);
  }
  loop.watch(fd, events, port);
  fd_ = fd;
  events_ = events;
}

void PortWatch::end(Loop& loop) noexcept {
  if (fd_ >= 0) {
    loop.unwatch(std::exchange(fd_, -1));
  }
}

// Of a shared link always: the peer's end must be noticed, and bytes of its bell must not pile up.
uint32_t OutPort::events() const noexcept {
  const auto room = static_cast<uint32_t>(link->roomEvent());
  if (shared != nullptr) {
    return reader_gone ? 0U : room;
  }
  return state_ == State::Open ? 0U : room;
}

void OutPort::watch(Loop& loop) {
  if (!hung_up_) {
    watch_.set(loop, link->fd(), events(), *this);
  }
}

// The peer never reads much of this connection, so it always has room: the loop returns at once to bytes that the kernel no longer has.
uint32_t InPort::events() const noexcept {
  return link->buffered() || link->unsent() ? EPOLLIN | EPOLLOUT : EPOLLIN;
}

void InPort::watch(Loop& loop) {
  if (!ended) {
    watch_.set(loop, link->fd(), events(), *this);
  }
}

} // namespace pycomm
