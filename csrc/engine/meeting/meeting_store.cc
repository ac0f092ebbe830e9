#include "engine/meeting/meeting_store.h"

#include <poll.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "base/printable.h"
#include "base/slow_wait.h"
#include "engine/meeting/endpoint_words.h"
#include "transport/net/greeted_link.h"
#include "transport/net/socket_link.h"

namespace pycomm {
namespace {

constexpr size_t kMaxListText = 2000;

const std::string& wordOf(const std::vector<std::string>& answer, size_t index) {
  if (index >= answer.size()) {
    throw Error(ErrorCode::ProtocolViolation, "the answer at an endpoint is not pycomm's");
  }
  return answer[index];
}

int64_t numberOf(const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw Error(ErrorCode::ProtocolViolation, "the answer at an endpoint is not pycomm's");
  }
  return number;
}

bool isHere(const std::vector<std::string>& answer) {
  return answer.front() == endpoint_answer::kHere;
}

constexpr const char* kTryAgain = "and call reconfigure() again with a new uuid";

} // namespace

std::string MeetingStore::get(const std::string& key, Deadline deadline) {
  const AbortToken none;
  for (;;) {
    if (auto value = find(key)) {
      return *std::move(value);
    }
    if (deadline.expired()) {
      throw Error(ErrorCode::RendezvousTimeout, "nobody has written " + key + " in time");
    }
    pauseFor(kShortPauseMs, deadline, none);
  }
}

bool OwnMeeting::fail(const ErrorRecord& cause) noexcept {
  try {
    return instance_->fail(cause);
  } catch (const std::exception&) { // no memory: the others find out when their connection ends
    return true;
  }
}

// The others only ask how many are ready.
void OwnMeeting::finish() noexcept {
  instance_->forget();
}

namespace {

std::unique_ptr<GreetedLink> greeting(const MemberHandle& to, const SocketAddress& way, const Visitor& from) {
  const TlsContext* const tls = from.endpoint.tls().get();
  const Hello hello = Endpoint::hello(way.isUnix() ? Endpoint::unixNonce(to, tls) : to.nonce);
  const TlsTarget target = way.isUnix() ? TlsTarget{} : TlsTarget{from.endpoint.tls(), to.endpoint};
  return std::make_unique<GreetedLink>(SocketAddress(), way, hello, target);
}

} // namespace

std::unique_ptr<Link> openWay(const MemberHandle& to, const SocketAddress& way, const Visitor& from) {
  return greeting(to, way, from);
}

Dialed dial(const MemberHandle& to, const Visitor& from, Deadline deadline, const AbortToken& abort) {
  Dialed dialed;
  size_t refused = 0;
  const std::vector<SocketAddress> ways = waysTo(to, from.self.host, from.unix_sockets);
  for (const SocketAddress& way : ways) {
    const Deadline patience = Deadline::at(std::min(deadline.instant(), Deadline::after(kOneTryMs).instant()));
    try {
      PYCOMM_FAULT_POINT("endpoint.dial");
      auto link = greeting(to, way, from);
      if (waitConnected(*link, patience, abort)) {
        dialed.link = std::move(link);
        return dialed;
      }
      dialed.why = "it does not answer at " + way.text() +
          (link->lastDrop().empty() ? "" : ", which has dropped a connection: " + link->lastDrop());
    } catch (const Error& error) {
      abort.throwIfAborted();
      const ErrorRecord& record = error.record();
      dialed.why = record.summary + (record.cause.empty() ? "" : " (" + record.cause + ")");
      refused += record.cause.rfind("ECONNREFUSED", 0) == 0 ? 1 : 0;
      // It speaks pycomm, and has another number than this handle.
      dialed.another_listens = dialed.another_listens || record.code == ErrorCode::ConfigMismatch;
    }
  }
  dialed.nobody_listens = !ways.empty() && refused == ways.size();
  dialed.why = ways.empty() ? "it has no address that this host could reach" : dialed.why;
  return dialed;
}

std::vector<std::string> askEndpoint(
    Link& link,
    const std::vector<std::string_view>& request,
    Deadline deadline,
    const AbortToken& abort) {
  const std::string packed = packWords(request);
  writeAll(link, {reinterpret_cast<const std::byte*>(packed.data()), packed.size()}, deadline, abort);
  uint32_t length = 0;
  readAll(link, {reinterpret_cast<std::byte*>(&length), sizeof length}, deadline, abort);
  if (length > kMaxEndpointFrame) {
    throw Error(ErrorCode::ProtocolViolation, "the answer at an endpoint is not pycomm's");
  }
  std::string answer(length, '\0');
  readAll(link, {reinterpret_cast<std::byte*>(answer.data()), answer.size()}, deadline, abort);
  auto words = unpackWords(answer);
  if (!words) {
    throw Error(ErrorCode::ProtocolViolation, "the answer at an endpoint is not pycomm's");
  }
  return *std::move(words);
}

std::vector<std::string> requestFor(std::string_view what, const Instance& instance, int to, int rank) {
  return {
      std::string(what),
      instance.member(to).incarnation,
      instance.member(rank).incarnation,
      instance.name(),
      std::to_string(instance.uuid()),
      std::to_string(rank)};
}

std::optional<ErrorRecord> refusalIn(
    const std::vector<std::string>& answer,
    const Instance& instance,
    int to,
    int rank) {
  const std::string& what = answer.front();
  if (what == endpoint_answer::kGone) {
    return instance.trouble(
        ErrorCode::PeerDead,
        to,
        "has no such group any more: its handle is of a group that was destroyed, or of an earlier process",
        std::string("get a new handle from that process ") + kTryAgain);
  }
  if (what == endpoint_answer::kOther) {
    ErrorRecord record = instance.trouble(
        ErrorCode::ConfigMismatch,
        to,
        "has called it with this uuid and another list of handles: " + printable(wordOf(answer, 1), kMaxListText),
        std::string("give all members the same list, in the same order, ") + kTryAgain);
    std::string mine;
    for (int member = 0; member < instance.size(); ++member) {
      mine += (member == 0 ? "" : "; ") + std::to_string(member) + ": " + instance.member(member).who();
    }
    record.summary += ". Rank " + std::to_string(instance.job().of(rank)) + " has " + mine;
    return record;
  }
  if (what == endpoint_answer::kFailed) {
    auto record = ErrorRecord::deserialize(wordOf(answer, 1), instance.size(), instance.job());
    return record
        ? *std::move(record)
        : instance.trouble(ErrorCode::ProtocolViolation, to, "has given up for a reason that cannot be read", "");
  }
  return std::nullopt;
}

RemoteMeeting::RemoteMeeting(
    std::shared_ptr<Instance> instance,
    int rank,
    const Visitor& from,
    Deadline deadline,
    int unresponsive_ms,
    const AbortToken& abort)
    : instance_(std::move(instance)), rank_(rank), deadline_(deadline), unresponsive_ms_(unresponsive_ms) {
  enter(from, abort);
}

void RemoteMeeting::enter(const Visitor& from, const AbortToken& abort) {
  const std::vector<std::string> words = requestFor(endpoint_request::kEnter, *instance_, 0, rank_);
  const std::vector<std::string_view> request(words.begin(), words.end());
  const TimePoint began = Clock::now();
  std::string last = "it has not called reconfigure() with this uuid";
  int refusals = 0;
  int pause_ms = kShortPauseMs;
  SlowWait slow(began);
  while (!deadline_.expired()) {
    if (link_ == nullptr) {
      Dialed dialed = dial(instance_->member(0), from, deadline_, abort);
      link_ = std::move(dialed.link);
      if (link_ == nullptr) {
        last = dialed.why;
        refusals = dialed.nobody_listens || dialed.another_listens ? refusals + 1 : 0;
        if (refusals >= kRefusals) {
          throw Error(instance_->trouble(
              ErrorCode::PeerDead,
              0,
              dialed.another_listens ? kAnotherListens : kNobodyListens,
              std::string("leave its handle out ") + kTryAgain));
        }
        pauseFor(kLastConnectPauseMs, deadline_, abort);
        continue;
      }
    }
    try {
      const Deadline patience = Deadline::at(
          std::min(
              std::max(deadline_.instant(), Deadline::after(kNearlyDoneMs).instant()),
              Deadline::after(unresponsive_ms_).instant()));
      const std::vector<std::string> answer = askEndpoint(*link_, request, patience, abort);
      if (isHere(answer)) {
        return;
      }
      if (auto refusal = refusalIn(answer, *instance_, 0, rank_)) {
        throw Error(*std::move(refusal));
      }
      last = "it has not called reconfigure() with this uuid";
      refusals = 0;
    } catch (const Error& error) {
      const ErrorCode code = error.record().code;
      if (abort.aborted() || (code != ErrorCode::ConnectionReset && code != ErrorCode::Timeout)) {
        throw;
      }
      last = error.record().summary;
      link_.reset();
    }
    if (const auto waited_s = slow.due(Clock::now())) {
      log(LogLevel::Warn,
          "reconfigure(uuid=" + std::to_string(instance_->uuid()) + ") has waited " + std::to_string(*waited_s) +
              " s for " + instance_->who(0) + ": " + last);
    }
    pauseFor(pause_ms, deadline_, abort);
    pause_ms = std::min(2 * pause_ms, kLongPauseMs);
  }
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count();
  ErrorRecord record = instance_->trouble(
      ErrorCode::RendezvousTimeout,
      0,
      "was not met within " + std::to_string(waited) + " ms (timed out): " + last,
      "did that process call reconfigure() with this uuid and this list, and can this host reach it? Leave its handle out if it has "
      "ended, call reconfigure() again with a new uuid, or give a longer timeout");
  record.elapsed_ms = waited;
  throw Error(record);
}

std::vector<std::string> RemoteMeeting::ask(const std::vector<std::string_view>& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (broken_) {
    throw Error(*broken_);
  }
  if (link_ == nullptr) {
    throw Error(ErrorCode::StoreLost, "the members have met, and their meeting is over");
  }
  const AbortToken none; // who was aborted has yet to say so here
  const Deadline patience = Deadline::at(
      std::min(
          std::max(deadline_.instant(), Deadline::after(kNearlyDoneMs).instant()),
          Deadline::after(unresponsive_ms_).instant()));
  try {
    PYCOMM_FAULT_POINT("endpoint.ask");
    std::vector<std::string> answer = askEndpoint(*link_, request, patience, none);
    if (answer.front() == endpoint_answer::kFailed || answer.front() == endpoint_answer::kGone) {
      throw Error(*refusalIn(answer, *instance_, 0, rank_));
    }
    return answer;
  } catch (const Error& error) {
    const ErrorCode code = error.record().code;
    if (code == ErrorCode::ConnectionReset) {
      broken_ = instance_->trouble(
          ErrorCode::PeerDead,
          0,
          "hung up before all members were ready: its process has ended, or a link to it broke",
          std::string("look for the first error in that process's log; leave its handle out ") + kTryAgain);
    } else if (code == ErrorCode::Timeout) {
      broken_ = instance_->trouble(
          ErrorCode::PeerUnresponsive,
          0,
          "does not answer: its process is stopped, or its host or network is down",
          std::string("leave its handle out ") + kTryAgain);
      leaveWord(*broken_);
    } else {
      broken_ = error.record();
    }
    throw Error(*broken_);
  }
}

void RemoteMeeting::leaveWord(const ErrorRecord& why) const noexcept {
  try {
    const std::string record = why.serialize();
    const std::string packed = packWords({endpoint_request::kFail, record});
    const ConstBufferView words(reinterpret_cast<const std::byte*>(packed.data()), packed.size());
    (void)link_->tryWrite(&words, 1);
  } catch (const std::exception&) { // it finds that the connection has ended
  }
}

void RemoteMeeting::set(const std::string& key, const std::string& value) {
  (void)ask({endpoint_request::kSet, key, value});
}

bool RemoteMeeting::has(const std::string& key) {
  return isHere(ask({endpoint_request::kHas, key}));
}

std::optional<std::string> RemoteMeeting::find(const std::string& key) {
  const std::vector<std::string> answer = ask({endpoint_request::kFind, key});
  return isHere(answer) ? std::optional<std::string>(wordOf(answer, 1)) : std::nullopt;
}

int64_t RemoteMeeting::add(const std::string& key, int64_t amount) {
  const std::string number = std::to_string(amount);
  return numberOf(wordOf(ask({endpoint_request::kAdd, key, number}), 1));
}

bool RemoteMeeting::remove(const std::string& key) {
  return isHere(ask({endpoint_request::kRemove, key}));
}

Instance::Ready RemoteMeeting::ready() {
  const std::vector<std::string> answer = ask({endpoint_request::kReady});
  Instance::Ready ready;
  ready.count = static_cast<int>(numberOf(wordOf(answer, 1)));
  ready.first_missing = static_cast<int>(numberOf(wordOf(answer, 2)));
  return ready;
}

bool RemoteMeeting::fail(const ErrorRecord& cause) noexcept {
  try {
    const std::string record = cause.serialize();
    if (ask({endpoint_request::kFail, record}).front() == endpoint_answer::kComplete) {
      return false;
    }
  } catch (const std::exception&) { // the first member has failed, too, or will see that the connection ends
  }
  try {
    instance_->fail(cause); // for those who ask here
  } catch (const std::exception&) { // no memory: they get no answer of use
  }
  return true;
}

void RemoteMeeting::finish() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  link_.reset();
}

} // namespace pycomm
