#include "transport/net/greeted_link.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "transport/secure/tls_link.h"

namespace pycomm {
namespace {

constexpr int kFirstGreetingPauseMs = 5; // doubled up to kLastGreetingPauseMs
constexpr int kLastGreetingPauseMs = 250;
constexpr int kDoublings = 6; // from the first to beyond the last

} // namespace

GreetedLink::GreetedLink(
    const SocketAddress& local,
    const SocketAddress& remote,
    const Hello& hello,
    const TlsTarget& tls)
    : local_(local), remote_(remote), hello_(hello), tls_(tls), introduction_(hello) {
  connect();
}

GreetedLink::GreetedLink(
    std::unique_ptr<SocketLink> first,
    const SocketAddress& local,
    const SocketAddress& remote,
    const Hello& hello,
    const TlsTarget& tls)
    : local_(local),
      remote_(remote),
      hello_(hello),
      tls_(tls),
      link_(secured(std::move(first))),
      introduction_(hello) {}

void GreetedLink::connect() {
  try {
    link_ = secured(startConnect(local_, remote_));
    introduction_ = Introduction(hello_);
    connected_ = false;
    pausing_ = false;
  } catch (const Error& error) {
    if (!remote_.isUnix() || error.record().cause.rfind("EAGAIN", 0) != 0) {
      throw;
    }
    pause(); // its queue is full
  }
}

std::unique_ptr<Link> GreetedLink::secured(std::unique_ptr<SocketLink> link) const {
  if (tls_.context == nullptr) {
    return link;
  }
  return TlsLink::connect(tls_.context, std::move(link), tls_.server);
}

short GreetedLink::roomEvent() const noexcept {
  if (pausing_) {
    return POLLIN;
  }
  return connected_ && !accepted_ && !link_->unsent() ? introduction_.event() : link_->roomEvent();
}

bool GreetedLink::finishConnect() {
  const bool was_pausing = pausing_;
  if (was_pausing) {
    uint64_t expired = 0;
    if (::read(pause_.get(), &expired, sizeof expired) != static_cast<ssize_t>(sizeof expired)) {
      return false;
    }
    connect(); // no loop watches the old one any more
    if (pausing_) {
      return false;
    }
  }
  if (accepted_) {
    return true;
  }
  try {
    connected_ = connected_ || link_->finishConnect();
    accepted_ = connected_ && introduction_.advance(*link_);
  } catch (const Error& error) {
    const ErrorRecord& record = error.record();
    const bool hello_was_changed = record.code == ErrorCode::DataCorrupt && record.peer == ErrorRecord::kThisEnd;
    if (record.code != ErrorCode::ConnectionReset && !hello_was_changed) {
      throw;
    }
    last_drop_ = hello_was_changed ? record.summary : "";
    pause();
  }
  if (accepted_ &&
      !was_pausing) { // else it is watched until this has returned, and stays open as long as the link does
    pause_.reset();
  }
  return accepted_;
}

void GreetedLink::pause() {
  if (!pause_) {
    pause_ = UniqueFd::from([] { return ::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC); });
    if (!pause_) {
      throw Error(systemError(ErrorCode::SystemError, "no timer (timerfd_create)", errno));
    }
  }
  const int64_t pause_ms = std::min(kFirstGreetingPauseMs << std::min(drops_++, kDoublings), kLastGreetingPauseMs);
  itimerspec until{};
  until.it_value.tv_nsec = pause_ms * 1000000;
  // Cannot fail: the descriptor is a timer of ours and the time is in range (man 2 timerfd_settime).
  (void)::timerfd_settime(pause_.get(), 0, &until, nullptr);
  pausing_ = true;
}

} // namespace pycomm
