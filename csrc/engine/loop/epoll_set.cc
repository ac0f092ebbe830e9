#include "engine/loop/epoll_set.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/error.h"

namespace pycomm {
namespace {

constexpr uint64_t kSignal = ~uint64_t{0};

[[noreturn]] void throwErrno(const char* call, int error_number) {
  const std::string summary = std::string("an event loop could not be set up: ") + call + " failed";
  throw Error(systemError(ErrorCode::SystemError, summary, error_number));
}

} // namespace

EpollSet::EpollSet()
    : epoll_(UniqueFd::from([] { return ::epoll_create1(EPOLL_CLOEXEC); })),
      signal_(UniqueFd::from([] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); })) {
  if (!epoll_) {
    throwErrno("epoll_create1", errno);
  }
  if (!signal_) {
    throwErrno("eventfd", errno);
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kSignal;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, signal_.get(), &event) != 0) {
    throwErrno("epoll_ctl", errno);
  }
}

void EpollSet::watch(int fd, uint32_t events, Loop::Handler& handler) {
  const auto found = watches_.find(fd);
  const int op = found == watches_.end() ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  const uint32_t serial = found == watches_.end() ? next_serial_++ : found->second.serial;
  epoll_event event{};
  event.events = events;
  event.data.u64 = (uint64_t{serial} << 32) | static_cast<uint32_t>(fd);
  watches_[fd] = Watch{&handler, serial}; // first: the kernel must not report a descriptor without a handler
  if (::epoll_ctl(epoll_.get(), op, fd, &event) != 0) {
    const int error_number = errno;
    watches_.erase(fd);
    throwErrno("epoll_ctl", error_number);
  }
}

void EpollSet::unwatch(int fd) noexcept {
  if (watches_.erase(fd) != 0) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  }
}

void EpollSet::signal() noexcept {
  const uint64_t one = 1;
  // Cannot fail in a way that matters: a full counter means that a wake-up is pending already.
  [[maybe_unused]] const ssize_t written = ::write(signal_.get(), &one, sizeof one);
}

void EpollSet::wait(Ready& ready, int timeout_ms) noexcept {
  ready.count = ::epoll_wait(epoll_.get(), ready.events.data(), static_cast<int>(ready.events.size()), timeout_ms);
}

void EpollSet::handle(const Ready& ready) noexcept {
  for (int i = 0; i < ready.count; ++i) {
    const epoll_event& event = ready.events[static_cast<size_t>(i)];
    if (event.data.u64 == kSignal) {
      uint64_t ignored = 0;
      [[maybe_unused]] const ssize_t got = ::read(signal_.get(), &ignored, sizeof ignored);
      continue;
    }
    // An earlier handler of this round may have unwatched this one, and another may have got its descriptor.
    const auto found = watches_.find(static_cast<int>(event.data.u64 & 0xffffffffU));
    if (found != watches_.end() && found->second.serial == static_cast<uint32_t>(event.data.u64 >> 32)) {
      Loop::Handler& handler = *found->second.handler;
      Loop::guarded(handler, [&] { handler.onReady(event.events); });
    }
  }
}

void EpollSet::sleep(int timeout_ms) const noexcept {
  pollfd ready{epoll_.get(), POLLIN, 0};
  ::poll(&ready, 1, timeout_ms);
}

} // namespace pycomm
