#include "transport/net/acceptor.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "transport/socket_error.h"

namespace pycomm {
namespace {

using std::chrono::milliseconds;

constexpr size_t kMaxStrangers = 64;
constexpr size_t kMaxBytesOfStranger = 512;
constexpr milliseconds kPatience{2000};
constexpr milliseconds kPauseWithoutFiles{100};
constexpr std::chrono::seconds kBetweenLogLines{10};
static_assert(kHelloNbytes < kMaxBytesOfStranger, "a hello must fit into what is read from strangers");

} // namespace

Acceptor::Acceptor(Listener listener, const AcceptorConfig& config)
    : listener_(std::move(listener)),
      config_(config),
      epoll_(UniqueFd::from([] { return ::epoll_create1(EPOLL_CLOEXEC); })) {
  if (!epoll_) {
    throw Error(systemError(ErrorCode::SystemError, "no epoll descriptor could be made", errno));
  }
  epoll_event event{};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.fd(), &event) != 0) {
    throw Error(systemError(ErrorCode::SystemError, "the listener cannot be watched", errno));
  }
  listen(true);
  keepSpare();
}

Acceptor::~Acceptor() = default;

std::vector<Accepted> Acceptor::poll(TimePoint now) {
  keepSpare();
  // Waiting strangers come first: one whose Hello is complete by now must not give way to a newcomer. All of them are
  // served, not only those that epoll reports: there are few, and so no descriptor outlives its stranger.
  for (auto stranger = strangers_.begin(); stranger != strangers_.end();) {
    stranger = serve(*stranger, now) ? strangers_.erase(stranger) : std::next(stranger);
  }
  if (listening_ || now >= listen_again_) {
    acceptNew(now);
  }
  return std::exchange(accepted_, {});
}

bool Acceptor::serve(Stranger& stranger, TimePoint now) {
  Verdict verdict = stranger.refused ? drain(stranger) : hear(stranger);
  if (verdict == Verdict::Wait && now - stranger.arrived >= kPatience) {
    verdict = giveUp("said nothing useful for 2 s");
  }
  switch (verdict) {
    case Verdict::Wait:
      return false;
    case Verdict::Introduced:
      introduce(stranger);
      return true;
    case Verdict::Drop:
      if (!stranger.refused) {
        reject(stranger, now);
      }
      return true;
  }
  return true;
}

void Acceptor::introduce(Stranger& stranger) {
  try {
    Accepted peer;
    peer.hello = decodeHello({stranger.bytes.data(), stranger.nbytes}).hello;
    (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, stranger.fd.get(), nullptr); // fails if it never waited
    const std::string reply = encodeHelloAccepted(config_.group);
    const ssize_t sent = ::send(stranger.fd.get(), reply.data(), reply.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent != static_cast<ssize_t>(reply.size())) { // a fresh connection has room, so this one is gone
      throw Error(systemError(ErrorCode::ConnectionReset, "no reply to the hello of " + stranger.remote.text(), errno));
    }
    peer.link = std::make_unique<TcpLink>(std::move(stranger.fd), config_.tcp);
    accepted_.push_back(std::move(peer));
  } catch (const std::exception& error) {
    log(LogLevel::Warn, std::string("a peer was lost: ") + error.what());
  }
}

void Acceptor::keepSpare() noexcept {
  if (!spare_) {
    spare_ = UniqueFd::from([] { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); });
  }
}

TimePoint Acceptor::nextDeadline() const noexcept {
  const TimePoint oldest = strangers_.empty() ? TimePoint::max() : strangers_.front().arrived + kPatience;
  return listening_ ? oldest : std::min(oldest, listen_again_);
}

void Acceptor::acceptNew(TimePoint now) {
  bool accepted = false;
  // At most one round of slots per call, so that a flood cannot keep the caller here.
  for (size_t i = 0; i < kMaxStrangers; ++i) {
    std::optional<Listener::Incoming> incoming;
    try {
      incoming = listener_.accept();
    } catch (const Error& error) {
      if (spare_) {
        spare_.reset();
        continue;
      }
      if (accepted) {
        return; // the stranger on the reserve descriptor is read first; most close again
      }
      if (!trouble_) {
        log(LogLevel::Warn, std::string("connections wait: ") + error.what());
        trouble_since_ = now;
      }
      trouble_ = error.record();
      pauseUntil(now + kPauseWithoutFiles);
      return;
    }
    trouble_.reset();
    trouble_since_ = TimePoint::max();
    listen(true);
    if (!incoming) {
      return;
    }
    accepted = true;
    Stranger stranger;
    stranger.fd = std::move(incoming->fd);
    stranger.remote = incoming->remote;
    stranger.arrived = now;
    if (serve(stranger, now)) {
      continue;
    }
    makeRoom(now);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, stranger.fd.get(), &event) == 0) {
      strangers_.push_back(std::move(stranger));
    }
  }
}

void Acceptor::makeRoom(TimePoint now) {
  if (strangers_.size() < kMaxStrangers) {
    return;
  }
  if (!serve(strangers_.front(), now)) {
    (void)giveUp("had not said who it is when others came");
    reject(strangers_.front(), now);
  }
  strangers_.pop_front();
}

Acceptor::Verdict Acceptor::giveUp(std::string why, bool harmless) {
  why_dropped_ = std::move(why);
  harmless_ = harmless;
  return Verdict::Drop;
}

Acceptor::Verdict Acceptor::hear(Stranger& stranger) {
  using State = HelloReading::State;
  for (;;) {
    // Reads no more than the Hello: the bytes after it belong to the owner of the link.
    const ssize_t got = ::recv(
        stranger.fd.get(),
        stranger.bytes.data() + stranger.nbytes,
        stranger.bytes.size() - stranger.nbytes,
        MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0 && errno == EAGAIN) {
      return Verdict::Wait;
    }
    if (got <= 0) { // the end or a reset, after at most the beginning of a Hello
      return giveUp("hung up before saying who it is", true);
    }
    PYCOMM_FAULT_POINT("hello.received");
    stranger.nbytes += static_cast<size_t>(got);
    const HelloReading reading = decodeHello({stranger.bytes.data(), stranger.nbytes});
    switch (reading.state) {
      case State::Incomplete:
        break;
      case State::ProtocolViolation:
        return giveUp(reading.why);
      case State::VersionMismatch:
        return refuse(stranger, ErrorCode::VersionMismatch, reading.why);
      case State::Complete: {
        const Hello& hello = reading.hello;
        if (hello.nonce != config_.nonce || hello.group != config_.group) {
          return refuse(stranger, ErrorCode::ConfigMismatch, "this port belongs to another pycomm job or group");
        }
        if (hello.size != config_.size) {
          const std::string sizes = std::to_string(config_.size) + " and " + std::to_string(hello.size);
          return refuse(stranger, ErrorCode::ConfigMismatch, "the two sides have world sizes " + sizes);
        }
        if (hello.rank == config_.rank || hello.epoch != config_.epoch) {
          return giveUp(
              "says that it is rank " + std::to_string(hello.rank) + " of epoch " + std::to_string(hello.epoch) +
              ", and this is rank " + std::to_string(config_.rank) + " of epoch " + std::to_string(config_.epoch));
        }
        if (PYCOMM_FAULT("hello.accept").error_number != 0) {
          return giveUp("was dropped by a fault point");
        }
        return Verdict::Introduced;
      }
    }
  }
}

Acceptor::Verdict Acceptor::drain(Stranger& stranger) {
  std::array<std::byte, kMaxBytesOfStranger> dropped; // NOLINT: only written
  for (;;) {
    const size_t left = kMaxBytesOfStranger - stranger.nbytes - stranger.drained;
    if (left == 0) {
      return Verdict::Drop;
    }
    const ssize_t got = ::recv(stranger.fd.get(), dropped.data(), left, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      return got < 0 && errno == EAGAIN ? Verdict::Wait : Verdict::Drop;
    }
    stranger.drained += static_cast<size_t>(got);
  }
}

Acceptor::Verdict Acceptor::refuse(Stranger& stranger, ErrorCode code, const std::string& why) {
  ErrorRecord reason;
  reason.code = code;
  reason.summary = listener_.address().text() + " refused a connection: " + why;
  reason.phase = "connect";
  if (code == ErrorCode::VersionMismatch) {
    reason.hint = "install the same pycomm on all hosts";
  }
  const std::string reply = encodeHelloRefused(reason);
  (void)giveUp(why);
  // One attempt, for as many bytes as fit: a fresh connection has room for a few hundred.
  if (::send(stranger.fd.get(), reply.data(), reply.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    return Verdict::Drop;
  }
  (void)::shutdown(stranger.fd.get(), SHUT_WR);
  reject(stranger, stranger.arrived);
  // Closing now would reset the connection over unread bytes, and the reply would be lost with it.
  stranger.refused = true;
  return drain(stranger);
}

void Acceptor::reject(const Stranger& stranger, TimePoint now) {
  ++rejected_;
  ++unlogged_;
  const LogLevel level = harmless_ ? LogLevel::Info : LogLevel::Warn;
  TimePoint& last = last_log_[harmless_ ? 0 : 1];
  if (now - last < kBetweenLogLines || !logEnabled(level)) {
    return;
  }
  log(level,
      listener_.address().text() + " turned away " + std::to_string(unlogged_) + " connection(s), the last from " +
          stranger.remote.text() + ": " + why_dropped_);
  last = now;
  unlogged_ = 0;
}

void Acceptor::pauseUntil(TimePoint instant) {
  listen_again_ = instant;
  listen(false);
}

void Acceptor::listen(bool on) {
  if (on == listening_) {
    return;
  }
  epoll_event event{};
  event.events = on ? static_cast<uint32_t>(EPOLLIN) : 0U;
  // Cannot fail: both descriptors are ours and the listener is in the set (man 2 epoll_ctl).
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.fd(), &event);
  listening_ = on;
}

} // namespace pycomm
