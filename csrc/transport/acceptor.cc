#include "transport/acceptor.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
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
constexpr milliseconds kPatienceWhenFull{100};
constexpr milliseconds kPauseWithoutFiles{100};
constexpr std::chrono::seconds kBetweenLogLines{10};
static_assert(kHelloNbytes < kMaxBytesOfStranger, "a hello must fit into what is read from strangers");

} // namespace

Acceptor::Acceptor(Listener listener, const AcceptorConfig& config)
    : listener_(std::move(listener)), config_(config), epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) {
    throw Error(systemError(ErrorCode::SystemError, "no epoll descriptor could be made", errno));
  }
  epoll_event event{};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.fd(), &event) != 0) {
    throw Error(systemError(ErrorCode::SystemError, "the listener cannot be watched", errno));
  }
  listen(true);
}

Acceptor::~Acceptor() = default;

std::vector<Accepted> Acceptor::poll(TimePoint now) {
  std::vector<Accepted> accepted;
  if (listening_ || now >= listen_again_) {
    acceptNew(now);
  }
  // All of them, not only those that epoll names: there are few, and no descriptor outlives its stranger this way.
  for (auto stranger = strangers_.begin(); stranger != strangers_.end();) {
    why_dropped_ = "said nothing useful for 2 s";
    Verdict verdict = stranger->refused ? drain(*stranger) : hear(*stranger);
    if (verdict == Verdict::Wait && now - stranger->arrived >= kPatience) {
      verdict = Verdict::Drop;
    }
    switch (verdict) {
      case Verdict::Wait:
        ++stranger;
        continue;
      case Verdict::Introduced: {
        Accepted peer;
        peer.hello = decodeHello({stranger->bytes.data(), stranger->nbytes}).hello;
        (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, stranger->link->fd(), nullptr);
        peer.link = std::move(stranger->link);
        accepted.push_back(std::move(peer));
        break;
      }
      case Verdict::Drop:
        if (!stranger->refused) {
          reject(*stranger, why_dropped_, now);
        }
        break;
    }
    stranger = strangers_.erase(stranger);
  }
  if (!listening_ && trouble_.empty() && strangers_.size() < kMaxStrangers) {
    listen(true);
  }
  return accepted;
}

TimePoint Acceptor::nextDeadline() const noexcept {
  const TimePoint oldest = strangers_.empty() ? TimePoint::max() : strangers_.front().arrived + kPatience;
  return listening_ ? oldest : std::min(oldest, listen_again_);
}

void Acceptor::acceptNew(TimePoint now) {
  // At most one round of places at a time, so that a flood cannot keep the caller here.
  for (size_t i = 0; i < kMaxStrangers; ++i) {
    if (!makeRoom(now)) {
      pauseUntil(strangers_.front().arrived + kPatienceWhenFull);
      return;
    }
    try {
      auto incoming = listener_.accept();
      trouble_.clear();
      listen(true);
      if (!incoming) {
        return;
      }
      Stranger stranger;
      stranger.link = std::make_unique<TcpLink>(std::move(incoming->fd), config_.tcp);
      stranger.arrived = now;
      epoll_event event{};
      event.events = EPOLLIN | EPOLLRDHUP;
      if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, stranger.link->fd(), &event) == 0) {
        strangers_.push_back(std::move(stranger));
      }
    } catch (const std::exception& error) {
      trouble_ = error.what();
      log(LogLevel::Warn, "connections wait: " + trouble_);
      pauseUntil(now + kPauseWithoutFiles);
      return;
    }
  }
}

bool Acceptor::makeRoom(TimePoint now) {
  if (strangers_.size() < kMaxStrangers) {
    return true;
  }
  if (now - strangers_.front().arrived < kPatienceWhenFull) {
    return false;
  }
  reject(strangers_.front(), "was silent while others waited", now);
  strangers_.pop_front();
  return true;
}

Acceptor::Verdict Acceptor::hear(Stranger& stranger) {
  using State = HelloReading::State;
  for (;;) {
    // Never more than the hello: what follows belongs to whoever takes the link.
    BufferView room{stranger.bytes.data() + stranger.nbytes, stranger.bytes.size() - stranger.nbytes};
    Progress progress;
    try {
      progress = stranger.link->tryRead(room);
    } catch (const std::exception& error) {
      why_dropped_ = error.what();
      return Verdict::Drop;
    }
    if (progress.would_block) {
      return Verdict::Wait;
    }
    if (progress.closed) {
      why_dropped_ = "hung up before saying who it is";
      return Verdict::Drop;
    }
    PYCOMM_FAULT_POINT("hello.received");
    stranger.nbytes += progress.nbytes;
    const HelloReading reading = decodeHello({stranger.bytes.data(), stranger.nbytes});
    switch (reading.state) {
      case State::Incomplete:
        break;
      case State::ProtocolViolation:
        why_dropped_ = reading.why;
        return Verdict::Drop;
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
        return Verdict::Introduced;
      }
    }
  }
}

Acceptor::Verdict Acceptor::drain(Stranger& stranger) {
  std::array<std::byte, kMaxBytesOfStranger> dropped; // NOLINT: only written
  try {
    for (;;) {
      const size_t left = kMaxBytesOfStranger - stranger.nbytes - stranger.drained;
      if (left == 0) {
        return Verdict::Drop;
      }
      const Progress progress = stranger.link->tryRead({dropped.data(), left});
      if (progress.would_block) {
        return Verdict::Wait;
      }
      if (progress.closed) {
        return Verdict::Drop;
      }
      stranger.drained += progress.nbytes;
    }
  } catch (const std::exception&) {
    return Verdict::Drop;
  }
}

Acceptor::Verdict Acceptor::refuse(Stranger& stranger, ErrorCode code, const std::string& why) {
  ErrorRecord reason;
  reason.code = code;
  reason.summary = listener_.address().text() + " refused a connection: " + why;
  reason.host = localHostName();
  reason.phase = "connect";
  if (code == ErrorCode::VersionMismatch) {
    reason.hint = "install the same pycomm on all hosts";
  }
  const std::string reply = encodeHelloRefused(config_.group, reason);
  const ConstBufferView bytes{reinterpret_cast<const std::byte*>(reply.data()), reply.size()};
  try {
    // Once, and as far as it goes: a fresh connection has room for a few hundred bytes.
    (void)stranger.link->tryWrite(&bytes, 1);
  } catch (const std::exception&) {
    return Verdict::Drop;
  }
  stranger.link->shutdownWrite();
  reject(stranger, why, stranger.arrived);
  // Closing now would reset the connection over unread bytes, and the reply would be lost with it.
  stranger.refused = true;
  return drain(stranger);
}

void Acceptor::reject(const Stranger& stranger, const std::string& why, TimePoint now) {
  ++rejected_;
  ++unlogged_;
  if (now - last_log_ < kBetweenLogLines || !logEnabled(LogLevel::Warn)) {
    return;
  }
  log(LogLevel::Warn,
      listener_.address().text() + " turned away " + std::to_string(unlogged_) + " connection(s), the last from " +
          stranger.link->remote().text() + ": " + why);
  last_log_ = now;
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
