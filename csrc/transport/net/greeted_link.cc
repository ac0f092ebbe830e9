#include "transport/net/greeted_link.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"
#include "transport/secure/tls_link.h"

namespace pycomm {
namespace {

[[noreturn]] void throwNoReply(const Link& link) {
  throw Error(
      ErrorCode::ProtocolViolation,
      "the reply to a hello on " + link.describe() + " is not pycomm's",
      "does another program listen there? Check that all ranks run the same build of pycomm");
}

constexpr int kDoublings = 6; // from the first to beyond the last

} // namespace

bool Introduction::read(Link& link, std::byte* into, size_t nbytes, size_t& got) const {
  while (got < nbytes) {
    const Progress progress = link.tryRead({into + got, nbytes - got});
    got += progress.nbytes;
    if (progress.closed) {
      throw Error(ErrorCode::ConnectionReset, "the peer closed " + link.describe() + " before it replied to the hello");
    }
    if (progress.would_block) {
      return false;
    }
  }
  return true;
}

bool Introduction::advance(Link& link) {
  if (written_ == 0) {
    PYCOMM_FAULT_POINT("hello.send");
  }
  while (!refused_ && written_ < bytes_.size()) {
    const ConstBufferView rest(reinterpret_cast<const std::byte*>(bytes_.data()) + written_, bytes_.size() - written_);
    const Progress progress = link.tryWrite(&rest, 1);
    written_ += progress.nbytes;
    if (written_ == bytes_.size()) {
      PYCOMM_FAULT_POINT("hello.sent");
    } else if (progress.nbytes == 0) {
      return false;
    }
  }
  if (!read(link, header_.data(), header_.size(), header_got_)) {
    return false;
  }
  FrameHeader header;
  std::memcpy(static_cast<void*>(&header), header_.data(), sizeof header);
  if (!refused_) {
    if (header.magic == FrameHeader::kMagic &&
        header.version != FrameHeader::kVersion) { // the rest may mean something else
      throw Error(
          ErrorCode::VersionMismatch,
          "on " + link.describe() + " the peer speaks pycomm wire version " + std::to_string(header.version) +
              " and this rank version " + std::to_string(FrameHeader::kVersion),
          "install the same pycomm on all hosts");
    }
    const bool reply = header.magic == FrameHeader::kMagic && header.type == FrameType::HelloReply;
    if (!reply || header.payload_nbytes > ErrorRecord::kMaxSerializedNbytes) {
      throwNoReply(link);
    }
    if (header.payload_nbytes == 0) {
      if (header.group != group_) {
        throwNoReply(link);
      }
      return true;
    }
    refused_ = true;
    bytes_.assign(header.payload_nbytes, '\0');
  }
  if (!read(link, reinterpret_cast<std::byte*>(bytes_.data()), bytes_.size(), payload_got_)) {
    return false;
  }
  throw Error(*decodeHelloReply({reinterpret_cast<const std::byte*>(bytes_.data()), bytes_.size()}, size_));
}

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
  const int64_t pause_ms = std::min(kShortPauseMs << std::min(drops_++, kDoublings), kLastConnectPauseMs);
  itimerspec until{};
  until.it_value.tv_nsec = pause_ms * 1000000;
  // Cannot fail: the descriptor is a timer of ours and the time is in range (man 2 timerfd_settime).
  (void)::timerfd_settime(pause_.get(), 0, &until, nullptr);
  pausing_ = true;
}

} // namespace pycomm
