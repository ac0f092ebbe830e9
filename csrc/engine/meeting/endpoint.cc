#include "engine/meeting/endpoint.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"
#include "base/fork_guard.h"
#include "base/log.h"
#include "engine/meeting/endpoint_words.h"
#include "transport/secure/tls_link.h"

namespace pycomm {
namespace {

constexpr uint32_t kEndpointGroup = 0x726f6f64; // "door": instead of the hash of a group
constexpr size_t kMostRemembered = 16;
constexpr size_t kMaxSessions = 8192;
constexpr size_t kMaxFoundSessions = 64; // anybody can ask at a fixed port
constexpr size_t kReadNbytes = 64 << 10;

std::optional<int64_t> numberIn(const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? std::optional<int64_t>(number) : std::nullopt;
}

} // namespace

/// The listening sockets. They are polled as one, like a group's.
class Endpoint::Ears final : public Loop::Handler, public Loop::Ticker {
 public:
  Ears(Endpoint& endpoint, std::vector<Listener> listeners) : endpoint_(endpoint) {
    for (Listener& listener : listeners) {
      const uint64_t nonce = listener.address().isUnix()
          ? endpoint.unixNonce(endpoint.addressed({}), endpoint.tls_.get())
          : endpoint.nonce_;
      acceptors_.push_back(std::make_unique<Acceptor>(std::move(listener), configOf(nonce, endpoint.tls_)));
    }
  }
  /// Not in the constructor: the destructor takes back what there was memory for.
  void open() {
    for (const auto& acceptor : acceptors_) {
      endpoint_.control_.watch(acceptor->fd(), EPOLLIN, *this);
    }
    endpoint_.control_.addTicker(*this);
  }
  ~Ears() override {
    endpoint_.control_.removeTicker(*this);
    for (const auto& acceptor : acceptors_) {
      endpoint_.control_.unwatch(acceptor->fd());
    }
    for (const Port& port : ports_) {
      leave(port);
    }
  }

  /// Of a port that another process has: why.
  [[nodiscard]] std::string offer(
      const ProcessId& of,
      const SocketAddress& address,
      const std::shared_ptr<const TlsContext>& tls) {
    ports_.push_back({of, address, tls, nullptr});
    try_again_ = Clock::now() + kOfferAgain;
    return take(ports_.back());
  }
  void withdraw(const ProcessId& of) noexcept {
    std::erase_if(ports_, [&](const Port& port) {
      if (port.of == of) {
        leave(port);
      }
      return port.of == of;
    });
  }

  void onReady(uint32_t) override {
    const TimePoint now = Clock::now();
    for (const auto& acceptor : acceptors_) {
      for (Accepted& accepted : acceptor->poll(now)) {
        endpoint_.admit(std::move(accepted), {});
      }
    }
    for (const Port& port : ports_) {
      if (port.acceptor != nullptr) {
        for (Accepted& accepted : port.acceptor->poll(now)) {
          endpoint_.admit(std::move(accepted), port.of);
        }
      }
    }
  }
  [[nodiscard]] TimePoint nextTick() const noexcept override;
  void tick(TimePoint now) override;
  void onThrown(const std::exception_ptr& exception) noexcept override {
    try {
      std::rethrow_exception(exception);
    } catch (const std::exception& error) {
      log(LogLevel::Warn, std::string("a process could not be let in to reconfigure: ") + error.what());
    }
  }

 private:
  /// Of offer().
  struct Port {
    ProcessId of;
    SocketAddress address;
    std::shared_ptr<const TlsContext> tls;
    std::unique_ptr<Acceptor> acceptor; ///< null: another process has it
  };

  [[nodiscard]] static AcceptorConfig configOf(uint64_t nonce, const std::shared_ptr<const TlsContext>& tls) {
    AcceptorConfig config;
    config.nonce = nonce;
    config.group = kEndpointGroup;
    config.size = 1; // with config.rank = -1 the visitor's rank 0 fits
    config.tls = tls;
    config.any_process = true; // which member it is, it says when it enters
    return config;
  }
  std::string take(Port& port) {
    try {
      Listener listener = Listener::bind(port.address, {port.address.port(), port.address.port()});
      listener.deferSilent();
      auto acceptor = std::make_unique<Acceptor>(std::move(listener), configOf(FixedPort::kNonce, port.tls));
      endpoint_.control_.watch(acceptor->fd(), EPOLLIN, *this);
      port.acceptor = std::move(acceptor);
      log(LogLevel::Info, "processes that want to join find this one at " + port.address.text());
      return "";
    } catch (const Error& error) {
      const ErrorRecord& record = error.record();
      return record.cause.empty() ? record.summary : record.cause;
    }
  }
  void leave(const Port& port) const noexcept {
    if (port.acceptor != nullptr) {
      endpoint_.control_.unwatch(port.acceptor->fd());
    }
  }

  Endpoint& endpoint_; ///< holds this
  std::vector<std::unique_ptr<Acceptor>> acceptors_;
  std::vector<Port> ports_;
  TimePoint try_again_; ///< to take those that other processes have
};

/// One process that has said Hello.
class Endpoint::Session final : public Loop::Handler {
 public:
  Session(Endpoint& endpoint, std::unique_ptr<Link> link, ProcessId found)
      : found(std::move(found)), endpoint_(endpoint), link_(std::move(link)), since_(Clock::now()) {
    endpoint_.control_.watch(link_->fd(), EPOLLIN, *this);
  }
  ~Session() override {
    endpoint_.control_.unwatch(link_->fd());
    if (instance != nullptr) {
      instance->left(rank, knows_that_it_entered);
    }
  }

  void onReady(uint32_t) override {
    try {
      serve();
    } catch (const Error&) { // the connection broke
      end();
    }
  }
  void onThrown(const std::exception_ptr&) noexcept override { // no memory
    end();
  }

  /// Throws Error(ConnectionReset).
  void serve() {
    std::array<std::byte, kReadNbytes> bytes; // NOLINT: only written
    if (!goesOn()) {
      return;
    }
    do {
      while (!takeRequest()) {
        if (over_) {
          return;
        }
        const Progress progress = link_->tryRead({bytes.data(), bytes.size()});
        in_.append(reinterpret_cast<const char*>(bytes.data()), progress.nbytes);
        if (progress.closed) {
          end();
          return;
        }
        if (progress.nbytes == 0) {
          return;
        }
      }
    } while (!in_.empty()); // what it gives up for is not lost with an answer that it does not wait for
    (void)goesOn(); // the next request has an event of its own
  }
  /// When it is dropped: at once if it is over, and a process that has not entered after a while. Single bytes do not put that off.
  [[nodiscard]] TimePoint patience() const noexcept {
    return over_ ? Loop::Ticker::kAtOnce : isStranger() ? since_ + kUnusedFor : TimePoint::max();
  }
  /// Nothing comes on it any more.
  void end() noexcept {
    if (!std::exchange(over_, true)) {
      endpoint_.control_.unwatch(link_->fd());
    }
  }
  /// The process at the other end, if the connection is in TLS.
  [[nodiscard]] std::optional<ProcessId> peer() const {
    const auto* const tls = dynamic_cast<const TlsLink*>(link_.get());
    return tls == nullptr ? std::nullopt : std::optional<ProcessId>(tls->peer());
  }

  const ProcessId found; ///< the incarnation at whose fixed port it came; else empty
  std::shared_ptr<Instance> instance; ///< that it has entered
  int rank = -1;
  bool knows_that_it_entered = false; ///< it has asked for something since
  std::weak_ptr<Mailbox> mailbox; ///< or to which it brings messages
  ProcessId from; ///< then it is this member or newcomer; else empty
  bool gives = false; ///< and it brings parts of a state

 private:
  [[nodiscard]] bool isStranger() const noexcept {
    return instance == nullptr && from.empty();
  }
  /// Whether the last answer has been sent, and there may be a next one: a caller at a fixed port gets one.
  bool goesOn() {
    if (!flush()) {
      return false;
    }
    if (answered_ && !found.empty()) {
      end();
    }
    return !over_;
  }
  /// False if there is no room: it goes on when there is.
  bool flush() {
    while (!out_.empty() || link_->unsent()) {
      const ConstBufferView rest(reinterpret_cast<const std::byte*>(out_.data()), out_.size());
      const Progress progress = link_->tryWrite(&rest, out_.empty() ? 0 : 1);
      out_.erase(0, progress.nbytes);
      if (progress.nbytes == 0 && (!out_.empty() || link_->unsent())) {
        writes_ = true;
        endpoint_.control_.watch(link_->fd(), static_cast<uint32_t>(link_->roomEvent()), *this);
        return false;
      }
    }
    if (std::exchange(writes_, false)) {
      endpoint_.control_.watch(link_->fd(), EPOLLIN, *this);
    }
    return true;
  }
  bool takeRequest() {
    uint32_t length = 0;
    if (over_ || in_.size() < sizeof length) {
      return false;
    }
    std::memcpy(&length, in_.data(), sizeof length);
    if (length > (isStranger() ? kMaxFirstEndpointFrame : kMaxEndpointFrame)) {
      end();
      return false;
    }
    if (in_.size() < sizeof length + length) {
      return false;
    }
    const auto request = unpackWords(std::string_view(in_).substr(sizeof length, length));
    in_.erase(0, sizeof length + length);
    // One request, one answer, in turn; only a member that gives up, because there is no answer, says so behind its request.
    if (!request || (isStranger() && !in_.empty()) || (!out_.empty() && request->front() != endpoint_request::kFail)) {
      end();
      return false;
    }
    out_ += endpoint_.answer(*this, *request);
    since_ = Clock::now();
    answered_ = true;
    return true;
  }

  Endpoint& endpoint_; ///< holds this
  const std::unique_ptr<Link> link_;
  std::string in_;
  std::string out_;
  TimePoint since_; ///< the Hello, or the last answer
  bool writes_ = false; ///< the loop reports room only
  bool answered_ = false;
  bool over_ = false;
};

TimePoint Endpoint::Ears::nextTick() const noexcept {
  TimePoint next = TimePoint::max();
  for (const auto& acceptor : acceptors_) {
    next = std::min(next, acceptor->nextDeadline());
  }
  for (const Port& port : ports_) {
    next = std::min(next, port.acceptor != nullptr ? port.acceptor->nextDeadline() : try_again_);
  }
  for (const auto& session : endpoint_.sessions_) {
    next = std::min(next, session->patience());
  }
  return next;
}

void Endpoint::Ears::tick(TimePoint now) {
  onReady(0);
  if (now >= try_again_) {
    try_again_ = now + kOfferAgain;
    for (Port& port : ports_) {
      if (port.acceptor == nullptr) {
        (void)take(port);
      }
    }
  }
  std::erase_if(endpoint_.sessions_, [now](const auto& session) { return now >= session->patience(); });
}

std::shared_ptr<Endpoint> Endpoint::open(EventLoop& control, Config config) {
  std::shared_ptr<Endpoint> endpoint(new Endpoint(control, config));
  control.run([&] {
    endpoint->ears_ = std::make_unique<Ears>(*endpoint, std::move(config.listeners));
    endpoint->ears_->open();
  });
  return endpoint;
}

Endpoint::Endpoint(EventLoop& control, const Config& config)
    : control_(control),
      forks_(forkCount()),
      tls_(config.tls),
      id_(config.id),
      nonce_(config.nonce),
      unix_name_(config.unix_name) {
  for (const Listener& listener : config.listeners) {
    if (!listener.address().isUnix()) {
      addresses_.push_back(listener.address());
    }
  }
}

Endpoint::~Endpoint() {
  close();
}

void Endpoint::close() noexcept {
  if (forkCount() != forks_) { // nor would its mutexes be safe: a thread of the parent may have held one
    (void)ears_.release();
    for (auto& session : sessions_) {
      (void)session.release();
    }
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(closed_, true)) {
      return;
    }
  }
  try {
    control_.run([this] {
      ears_.reset();
      sessions_.clear();
    });
  } catch (const std::exception&) { // no memory for the task: the descriptors stay until the process ends
  }
}

MemberHandle Endpoint::addressed(MemberHandle handle) const {
  handle.version = FrameHeader::kVersion;
  handle.endpoint = id_;
  handle.nonce = nonce_;
  handle.key_id = tls_ == nullptr ? "" : tls_->secret().keyId();
  handle.host = HostIdentity::ofThisProcess();
  std::replace(handle.host.hostname.begin(), handle.host.hostname.end(), ';', '_'); // a separator of the handle
  handle.pid = ProcessIdentity::ofThisProcess().pid;
  handle.unix_socket = unix_name_;
  handle.addresses = addresses_;
  return handle;
}

uint64_t Endpoint::unixNonce(const MemberHandle& handle, const TlsContext* tls) {
  if (tls == nullptr) {
    return handle.nonce;
  }
  const Key key = tls->secret().derive("pycomm 1 door" + handle.endpoint);
  uint64_t nonce = 0;
  std::memcpy(&nonce, key.bytes(), sizeof nonce);
  return nonce;
}

Hello Endpoint::hello(uint64_t nonce) {
  Hello hello;
  hello.nonce = nonce;
  hello.rank = 0;
  hello.size = 1;
  hello.group = kEndpointGroup;
  return hello;
}

void Endpoint::add(const ProcessId& incarnation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  here_[incarnation];
}

void Endpoint::remove(const ProcessId& incarnation) noexcept {
  if (forkCount() != forks_) {
    return;
  }
  withdraw(incarnation);
  const std::lock_guard<std::mutex> lock(mutex_);
  here_.erase(incarnation);
  mailboxes_.erase(incarnation);
}

std::vector<Endpoint::Offer> Endpoint::offer(
    const ProcessId& incarnation,
    const std::vector<SocketAddress>& addresses,
    const std::shared_ptr<const TlsContext>& tls) {
  std::vector<Offer> offers;
  control_.run([&] {
    if (ears_ == nullptr) {
      throw Error(ErrorCode::ShutDown, "the process group was destroyed while its ports were being opened");
    }
    ears_->withdraw(incarnation); // of an earlier call
    for (const SocketAddress& address : addresses) {
      offers.push_back({address, ears_->offer(incarnation, address, tls)});
    }
  });
  return offers;
}

void Endpoint::withdraw(const ProcessId& incarnation) noexcept {
  if (forkCount() != forks_) {
    return;
  }
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_) { // before the last task of close()
      control_.post([this, incarnation]() noexcept {
        if (ears_ != nullptr) {
          ears_->withdraw(incarnation);
        }
      });
    }
  } catch (const std::exception&) { // no memory for the task: the ports stay until the endpoint closes
  }
}

void Endpoint::receive(const ProcessId& incarnation, std::weak_ptr<Mailbox> mailbox) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::weak_ptr<Mailbox>& known = mailboxes_[incarnation];
  if (!known.expired()) {
    throw Error(
        ErrorCode::InvalidArgument,
        "This process group has an elastic agreement on its steps already.",
        "make a process group for each wrapper");
  }
  known = std::move(mailbox);
}

void Endpoint::forgetOld(std::deque<Called>& called, TimePoint now) const {
  while (!called.empty() && (called.size() > kMostRemembered || now - called.front().since > kRemembered)) {
    called.pop_front();
  }
}

void Endpoint::call(const ProcessId& incarnation, std::shared_ptr<Instance> instance) {
  const TimePoint now = Clock::now();
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto here = here_.find(incarnation);
  if (here == here_.end()) {
    throw Error(ErrorCode::ShutDown, "the process group was destroyed while reconfigure() was under way");
  }
  std::deque<Called>& called = here->second;
  for (const Called& before : called) {
    before.instance->forget();
  }
  called.push_back({std::move(instance), now});
  if (called.size() > 1) {
    forgetOld(called, now);
  }
}

void Endpoint::admit(Accepted accepted, const ProcessId& found) {
  const auto wasFound = [](const auto& session) { return !session->found.empty(); };
  if (sessions_.size() >= kMaxSessions ||
      (!found.empty() &&
       static_cast<size_t>(std::count_if(sessions_.begin(), sessions_.end(), wasFound)) >= kMaxFoundSessions)) {
    log(LogLevel::Warn, "too many processes are at the endpoint: a connection was dropped, and tries again");
    return;
  }
  sessions_.push_back(std::make_unique<Session>(*this, std::move(accepted.link), found));
  Session& fresh = *sessions_.back();
  Loop::guarded(fresh, [&] { fresh.onReady(0); }); // what came with the Hello
}

std::shared_ptr<Instance> Endpoint::find(const ProcessId& to, const std::string& name, int64_t uuid, std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto here = here_.find(to);
  if (here == here_.end()) {
    why = packWords({endpoint_answer::kGone});
    return nullptr;
  }
  for (auto called = here->second.rbegin(); called != here->second.rend(); ++called) {
    const Instance& instance = *called->instance;
    if (instance.name() == name) {
      return called->instance;
    }
    if (instance.uuid() == uuid) {
      std::string list;
      for (int rank = 0; rank < instance.size(); ++rank) {
        list += (rank == 0 ? "" : "; ") + std::to_string(rank) + ": " + instance.member(rank).who();
      }
      why = packWords({endpoint_answer::kOther, list});
      return nullptr;
    }
  }
  why = packWords({endpoint_answer::kNotYet});
  return nullptr;
}

std::string Endpoint::letIn(Session& session, const std::vector<std::string>& request) {
  const auto uuid = request.size() == 6 ? numberIn(request[4]) : std::nullopt;
  const auto rank = request.size() == 6 ? numberIn(request[5]) : std::nullopt;
  if (!uuid || !rank || session.instance != nullptr) {
    return packWords({endpoint_answer::kGone});
  }
  std::string why;
  const std::shared_ptr<Instance> instance = find(request[1], request[3], *uuid, why);
  if (instance == nullptr) {
    return why;
  }
  if (const auto failure = instance->failure()) {
    return packWords({endpoint_answer::kFailed, failure->serialize()});
  }
  const bool fits =
      *rank >= 0 && *rank < instance->size() && instance->member(static_cast<int>(*rank)).incarnation == request[2];
  const auto peer = session.peer();
  if (!fits || (peer && instance->member(static_cast<int>(*rank)).endpoint != *peer)) {
    return packWords({endpoint_answer::kGone});
  }
  if (request[0] == endpoint_request::kLook) {
    return packWords({endpoint_answer::kHere});
  }
  if (instance->member(0).incarnation != request[1] || !instance->enter(static_cast<int>(*rank))) {
    return packWords({endpoint_answer::kNotYet}); // its last connection has not been seen to end
  }
  session.instance = instance;
  session.rank = static_cast<int>(*rank);
  return packWords({endpoint_answer::kHere});
}

std::string Endpoint::introduce(Session& session, const std::vector<std::string>& request) {
  if (request.size() != 4 || session.instance != nullptr || !session.from.empty()) {
    return packWords({endpoint_answer::kGone});
  }
  std::string why;
  const std::shared_ptr<Mailbox> mailbox = mailboxOf(request[1], why);
  if (mailbox == nullptr) {
    return why;
  }
  if (!mailbox->knows(request[2], request[3], session.peer())) {
    return packWords({endpoint_answer::kGone});
  }
  session.gives = request[0] == endpoint_request::kGive;
  for (const auto& other :
       sessions_) { // one connection per member: it has opened another, so that one is of no use to it
    if (other->from == request[2] && other->gives == session.gives && other->mailbox.lock() == mailbox) {
      other->end();
    }
  }
  session.mailbox = mailbox;
  session.from = request[2];
  return packWords({endpoint_answer::kHere});
}

std::shared_ptr<Endpoint::Mailbox> Endpoint::mailboxOf(const ProcessId& to, std::string& why) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = mailboxes_.find(to);
  std::shared_ptr<Mailbox> mailbox = found == mailboxes_.end() ? nullptr : found->second.lock();
  if (mailbox == nullptr) {
    why = packWords({here_.count(to) != 0 ? endpoint_answer::kNotYet : endpoint_answer::kGone});
  }
  return mailbox;
}

std::string Endpoint::answerWho(const Session& session, const std::vector<std::string>& request) const {
  std::string why;
  const std::shared_ptr<Mailbox> mailbox =
      request.size() == 2 ? mailboxOf(session.found.empty() ? request[1] : session.found, why) : nullptr;
  if (mailbox == nullptr) {
    return why.empty() ? packWords({endpoint_answer::kGone}) : why;
  }
  const std::vector<std::string> notice = mailbox->notice();
  std::vector<std::string_view> words = {notice.empty() ? endpoint_answer::kNone : endpoint_answer::kHere};
  words.insert(words.end(), notice.begin(), notice.end());
  return packWords(words);
}

std::string Endpoint::answer(Session& session, const std::vector<std::string>& request) {
  namespace ask = endpoint_request;
  const std::string& what = request.front();
  if (what == ask::kWho) {
    return answerWho(session, request);
  }
  if (!session.found.empty()) { // all else is asked of a process that one knows
    return packWords({endpoint_answer::kGone});
  }
  if (what == ask::kAgree || what == ask::kGive) {
    return introduce(session, request);
  }
  if (!session.from.empty()) {
    const std::shared_ptr<Mailbox> mailbox = session.mailbox.lock();
    if (mailbox != nullptr && session.gives && what == ask::kState) {
      return packWords({mailbox->take(session.from, request) ? endpoint_answer::kHere : endpoint_answer::kNone});
    }
    if (mailbox == nullptr || session.gives || what != ask::kSay || request.size() != 2) {
      return packWords({endpoint_answer::kGone});
    }
    return packWords({mailbox->deliver(session.from, request[1]) ? endpoint_answer::kHere : endpoint_answer::kGone});
  }
  if (what == ask::kEnter || what == ask::kLook) {
    return letIn(session, request);
  }
  if (session.instance == nullptr) {
    return packWords({endpoint_answer::kGone});
  }
  Instance& instance = *session.instance;
  session.knows_that_it_entered = true;
  try {
    PYCOMM_FAULT_POINT("endpoint.answer");
    if (what == ask::kSet && request.size() == 3) {
      instance.set(request[1], request[2]);
      return packWords({endpoint_answer::kHere});
    }
    if (what == ask::kFind && request.size() == 2) {
      const auto value = instance.find(request[1]);
      return value ? packWords({endpoint_answer::kHere, *value}) : packWords({endpoint_answer::kNone});
    }
    if (what == ask::kHas && request.size() == 2) {
      return packWords({instance.has(request[1]) ? endpoint_answer::kHere : endpoint_answer::kNone});
    }
    if (what == ask::kRemove && request.size() == 2) {
      return packWords({instance.remove(request[1]) ? endpoint_answer::kHere : endpoint_answer::kNone});
    }
    if (what == ask::kAdd && request.size() == 3) {
      if (const auto amount = numberIn(request[2])) {
        return packWords({endpoint_answer::kHere, std::to_string(instance.add(request[1], *amount))});
      }
    }
    if (what == ask::kReady && request.size() == 1) {
      const Instance::Ready ready = instance.ready(session.rank);
      return packWords({endpoint_answer::kHere, std::to_string(ready.count), std::to_string(ready.first_missing)});
    }
    if (what == ask::kFail && request.size() == 2) {
      const auto record = ErrorRecord::deserialize(request[1], instance.size(), instance.job());
      if (record && !instance.fail(*record)) {
        return packWords({endpoint_answer::kComplete});
      }
      if (record) {
        instance.told(session.rank);
      }
      return packWords({endpoint_answer::kHere});
    }
    throw Error(ErrorCode::ProtocolViolation, "a member asks for what no pycomm of this version asks for");
  } catch (const Error& error) {
    instance.told(session.rank);
    return packWords({endpoint_answer::kFailed, error.record().serialize()});
  }
}

} // namespace pycomm
