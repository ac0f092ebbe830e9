#include "transport/net/acceptor.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"
#include "base/fork_guard.h"
#include "base/log.h"
#include "base/slow_wait.h"

namespace pycomm {
namespace {

constexpr size_t kMaxStrangers = 64; // of all acceptors of this process together
constexpr size_t kFewestStrangers = 4; // of each, however many the others have
constexpr size_t kMaxBytesOfStranger = 512;
constexpr std::byte kFirstTls{0x16}; // a record of a handshake
constexpr std::byte kFirstPlain{'c'}; // of FrameHeader::kMagic
constexpr const char* kHungUp = "hung up before saying who it is";
static_assert(kHelloNbytes < kMaxBytesOfStranger, "a hello must fit into what is read from strangers");

/// How many connections wait in all acceptors of this process without having said who they are. They must not take the descriptors that
/// the program needs, whatever number of groups it has.
class StrangerCount {
 public:
  /// A child of fork() inherits the number, but not the strangers: the parent's acceptors do nothing there. Each acceptor calls this first.
  void beginAfterFork() noexcept {
    const uint64_t mine = uint64_t{forkCount()} << 32;
    uint64_t seen = state_.load();
    while ((seen & kProcess) != mine && !state_.compare_exchange_weak(seen, mine)) {
    }
  }
  void add() noexcept {
    state_.fetch_add(1, std::memory_order_relaxed);
  }
  void remove(size_t strangers) noexcept {
    state_.fetch_sub(strangers, std::memory_order_relaxed);
  }
  [[nodiscard]] size_t value() const noexcept {
    return state_.load(std::memory_order_relaxed) & ~kProcess;
  }

 private:
  static constexpr uint64_t kProcess = ~uint64_t{0} << 32;
  std::atomic<uint64_t> state_{0}; ///< the forkCount() of the process that counts, and in the lower half the number
};

StrangerCount g_strangers;

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
  g_strangers.beginAfterFork();
  listen(true);
  keepSpare();
}

Acceptor::~Acceptor() {
  g_strangers.remove(strangers_.size());
}

// One attempt, for as many bytes as fit: a fresh connection has room for a few hundred.
bool Acceptor::Stranger::send(const std::string& reply) {
  if (tls == nullptr) {
    return ::send(fd.get(), reply.data(), reply.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
        static_cast<ssize_t>(reply.size());
  }
  const ConstBufferView bytes(reinterpret_cast<const std::byte*>(reply.data()), reply.size());
  return tls->tryWrite(&bytes, 1).nbytes == reply.size() && !tls->unsent();
}

std::vector<Accepted> Acceptor::poll(TimePoint now) {
  keepSpare();
  // Waiting strangers come first: one whose Hello is complete by now must not give way to a newcomer. All of them are
  // served, not only those that epoll reports: there are few, and so no descriptor outlives its stranger.
  for (auto stranger = strangers_.begin(); stranger != strangers_.end();) {
    stranger = serve(*stranger, now) ? forget(stranger) : std::next(stranger);
  }
  if (listening_ || now >= listen_again_) {
    acceptNew(now);
  }
  return std::exchange(accepted_, {});
}

bool Acceptor::serve(Stranger& stranger, TimePoint now) {
  Verdict verdict = stranger.refused ? drain(stranger) : readFirst(stranger);
  if (verdict == Verdict::Wait && now - stranger.arrived >= kStrangerWithin) {
    verdict = giveUp("said nothing useful for " + std::to_string(kStrangerWithin.count()) + " s");
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
    (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, stranger.watched(), nullptr); // fails if it never waited
    if (!stranger.send(encodeHelloAccepted(config_.group))) { // a fresh connection has room, so this one is gone
      throw Error(systemError(ErrorCode::ConnectionReset, "no reply to the hello of " + stranger.remote.text(), errno));
    }
    if (stranger.tls != nullptr) {
      peer.link = std::move(stranger.tls);
    } else {
      peer.link = std::make_unique<SocketLink>(std::move(stranger.fd));
    }
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
  const TimePoint oldest = strangers_.empty() ? TimePoint::max() : strangers_.front().arrived + kStrangerWithin;
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
      pauseUntil(now + std::chrono::milliseconds(kLongPauseMs));
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
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, stranger.watched(), &event) == 0) {
      strangers_.push_back(std::move(stranger));
      g_strangers.add();
    }
  }
}

void Acceptor::makeRoom(TimePoint now) {
  if (strangers_.size() >= kFewestStrangers && g_strangers.value() >= kMaxStrangers) {
    dropOldest(now);
  }
}

void Acceptor::dropOldest(TimePoint now) {
  // Not one that knows the secret, if there is another: it only waits for the next message of its handshake.
  auto oldest = std::find_if(strangers_.begin(), strangers_.end(), [](const Stranger& stranger) {
    return stranger.tls == nullptr || !stranger.tls->hasAnswered();
  });
  if (oldest == strangers_.end()) {
    oldest = strangers_.begin();
  }
  if (!serve(*oldest, now)) {
    (void)giveUp("had not said who it is when others came");
    reject(*oldest, now);
  }
  (void)forget(oldest);
}

std::list<Acceptor::Stranger>::iterator Acceptor::forget(std::list<Stranger>::iterator stranger) noexcept {
  g_strangers.remove(1);
  return strangers_.erase(stranger);
}

Acceptor::Verdict Acceptor::giveUp(std::string why, bool harmless) {
  why_dropped_ = std::move(why);
  harmless_ = harmless;
  return Verdict::Drop;
}

Acceptor::Verdict Acceptor::readFirst(Stranger& stranger) {
  if (wantsTls()) {
    std::byte first = kFirstPlain;
    if (stranger.tls == nullptr && stranger.nbytes == 0) {
      const ssize_t got = ::recv(stranger.fd.get(), &first, 1, MSG_DONTWAIT | MSG_PEEK);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return Verdict::Wait;
      }
      if (got <= 0) {
        return giveUp(kHungUp, true);
      }
    }
    if (stranger.tls != nullptr || first == kFirstTls) {
      return readTls(stranger);
    }
    if (first != kFirstPlain) {
      return giveUp("does not speak TLS");
    }
  }
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
      return giveUp(kHungUp, true);
    }
    stranger.nbytes += static_cast<size_t>(got);
    if (const Verdict verdict = judge(stranger); verdict != Verdict::Wait) {
      return verdict;
    }
  }
}

Acceptor::Verdict Acceptor::readTls(Stranger& stranger) {
  try {
    if (stranger.tls == nullptr) {
      stranger.tls = TlsLink::accept(config_.tls, std::make_unique<SocketLink>(std::move(stranger.fd)));
    }
    if (!stranger.tls->finishConnect()) {
      return Verdict::Wait;
    }
    for (;;) {
      const BufferView rest{stranger.bytes.data() + stranger.nbytes, stranger.bytes.size() - stranger.nbytes};
      const Progress progress = stranger.tls->tryRead(rest);
      if (progress.closed) {
        return giveUp(kHungUp, true);
      }
      if (progress.would_block) {
        return Verdict::Wait;
      }
      stranger.nbytes += progress.nbytes;
      if (const Verdict verdict = judge(stranger); verdict != Verdict::Wait) {
        return verdict;
      }
    }
  } catch (const Error& error) {
    const ErrorRecord& record = error.record();
    const std::string hint = record.hint.empty() ? "" : ". Try: " + record.hint;
    return giveUp(record.summary + hint, record.code == ErrorCode::ConnectionReset);
  } catch (const std::exception& error) { // no memory: a peer tries again
    return giveUp(error.what());
  }
}

Acceptor::Verdict Acceptor::judge(Stranger& stranger) {
  using State = HelloReading::State;
  PYCOMM_FAULT_POINT("hello.received");
  const HelloReading reading = decodeHello({stranger.bytes.data(), stranger.nbytes});
  switch (reading.state) {
    case State::Incomplete:
      return Verdict::Wait;
    case State::ProtocolViolation:
      return stranger.bytes[0] == kFirstTls
          ? refuse(stranger, ErrorCode::ConfigMismatch, "the rank that connects has a secret, this one has none")
          : giveUp(reading.why);
    case State::VersionMismatch:
      return refuse(stranger, ErrorCode::VersionMismatch, reading.why);
    case State::Complete:
      break;
  }
  const Hello& hello = reading.hello;
  if (wantsTls() && stranger.tls == nullptr) {
    return refuse(stranger, ErrorCode::ConfigMismatch, "this port belongs to a job with a secret");
  }
  if (hello.nonce != config_.nonce || hello.group != config_.group) {
    return refuse(stranger, ErrorCode::ConfigMismatch, "this port belongs to another pycomm job or group");
  }
  if (hello.size != config_.size) {
    const std::string sizes = std::to_string(config_.size) + " and " + std::to_string(hello.size);
    return refuse(stranger, ErrorCode::ConfigMismatch, "the two sides have world sizes " + sizes);
  }
  if (hello.rank == config_.rank || hello.epoch != config_.epoch) {
    return giveUp(
        "says that it is " + config_.job.text(hello.rank) + " of epoch " + std::to_string(hello.epoch) +
        ", and this is " + config_.job.text(config_.rank) + " of epoch " + std::to_string(config_.epoch));
  }
  if (stranger.tls != nullptr && !config_.any_process &&
      config_.processes.at(static_cast<size_t>(hello.rank)) != stranger.tls->peer()) {
    return giveUp("says that it is " + config_.job.text(hello.rank) + ", and is not that rank's process");
  }
  if (PYCOMM_FAULT("hello.accept").error_number != 0) {
    return giveUp("was dropped by a fault point");
  }
  return Verdict::Introduced;
}

Acceptor::Verdict Acceptor::drain(Stranger& stranger) {
  std::array<std::byte, kMaxBytesOfStranger> dropped; // NOLINT: only written
  for (;;) {
    const size_t left = kMaxBytesOfStranger - stranger.nbytes - stranger.drained;
    if (left == 0) {
      return Verdict::Drop;
    }
    const ssize_t got = ::recv(stranger.watched(), dropped.data(), left, MSG_DONTWAIT);
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
  reason.phase = ErrorPhase::Connect;
  reason.hint = code == ErrorCode::VersionMismatch
      ? "install the same pycomm on all hosts"
      : "give each job its own port; start all ranks alike, with one secret file";
  const std::string reply = encodeHelloRefused(reason);
  (void)giveUp(why);
  if (!stranger.send(reply)) {
    return Verdict::Drop;
  }
  if (stranger.tls != nullptr) {
    stranger.tls->shutdownWrite();
  } else {
    (void)::shutdown(stranger.fd.get(), SHUT_WR);
  }
  reject(stranger, stranger.arrived);
  // Closing now would reset the connection over unread bytes, and the reply would be lost with it.
  stranger.refused = true;
  return drain(stranger);
}

void Acceptor::reject(const Stranger& stranger, TimePoint now) {
  if (harmless_ && stranger.nbytes == 0 && listener_.address().isUnix()) {
    return; // a rank of this host tried whether it reaches this one: see UnixSockets
  }
  ++rejected_;
  ++unlogged_;
  const LogLevel level = harmless_ ? LogLevel::Info : LogLevel::Warn;
  TimePoint& last = last_log_[harmless_ ? 0 : 1];
  if (now - last < SlowWait::kFirst || !logEnabled(level)) {
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
