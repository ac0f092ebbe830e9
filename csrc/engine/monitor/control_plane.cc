#include "engine/monitor/control_plane.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fault_point.h"
#include "engine/monitor/control_link.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

// Shorter than the time in which a group chooses the cause of a failure: what waits to be read may be a better one.
constexpr std::chrono::milliseconds kReadAgain{1};

FrameType typeOf(Membership::Action::Kind kind) noexcept {
  switch (kind) {
    case Membership::Action::Kind::Flood:
    case Membership::Action::Kind::Fail: // is not told
      return FrameType::Failure;
    case Membership::Action::Kind::Left:
      return FrameType::Left;
    case Membership::Action::Kind::Leaving:
      return FrameType::Leaving;
    case Membership::Action::Kind::Heartbeat:
      return FrameType::Heartbeat;
  }
  return FrameType::Heartbeat;
}

} // namespace

ControlPlane::ControlPlane(
    GroupIdentity identity,
    Loop& loop,
    std::vector<Listener> listeners,
    Membership::Config membership,
    Events events)
    : identity_(std::move(identity)),
      loop_(loop),
      events_(std::move(events)),
      membership_(membership, Clock::now()),
      staging_(loop_.stagingMemory()),
      missing_(membership.neighbours) {
  AcceptorConfig config;
  config.group = identity_.hash;
  config.epoch = identity_.epochOnWire();
  config.rank = identity_.rank;
  config.size = identity_.size;
  config.job = identity_.job;
  config.tls = identity_.tls;
  config.processes = identity_.processes;
  for (Listener& listener : listeners) {
    config.nonce = listener.address().isUnix() ? identity_.unix_nonce : identity_.nonce;
    acceptors_.push_back(std::make_unique<Acceptor>(std::move(listener), config));
  }
}

ControlPlane::~ControlPlane() {
  static_cast<void>(close());
}

void ControlPlane::open() {
  open_ = true;
  for (const auto& acceptor : acceptors_) {
    loop_.watch(acceptor->fd(), EPOLLIN, *this);
  }
  loop_.addTicker(*this);
}

std::vector<std::unique_ptr<Link>> ControlPlane::close() noexcept {
  std::vector<std::unique_ptr<Link>> closing;
  if (!std::exchange(open_, false)) {
    return closing;
  }
  try {
    closing.reserve(links_.size());
  } catch (const std::exception&) { // they are closed as they are
  }
  for (const auto& acceptor : acceptors_) {
    loop_.unwatch(acceptor->fd());
  }
  loop_.removeTicker(*this);
  for (const auto& entry : links_) {
    ControlLink& link = *entry.second;
    if (link.down) {
      continue;
    }
    link.down = true;
    loop_.unwatch(link.link->fd());
    try {
      link.out.drop([](const FrameHeader& queued) { // else they might leave no room for the goodbye
        return queued.type == FrameType::Waiting || queued.type == FrameType::NotEntered;
      });
      sendTo(link, header(FrameType::Goodbye), "");
      std::vector<OutFrame> sent;
      static_cast<void>(link.out.flush(sent));
    } catch (const std::exception&) { // it is gone already, or there is no memory to say more
    }
    if (closing.size() < closing.capacity()) {
      closing.push_back(std::move(link.link));
    }
  }
  return closing;
}

FrameHeader ControlPlane::header(FrameType type) const {
  FrameHeader header;
  header.type = type;
  header.group = identity_.hash;
  header.epoch = identity_.epochOnWire();
  return header;
}

void ControlPlane::adopt(int peer, std::unique_ptr<Link> link) {
  if (!open_ || links_.count(peer) != 0) {
    return;
  }
  auto made = std::make_unique<ControlLink>(*this, peer, std::move(link));
  ControlLink& kept = *links_.emplace(peer, std::move(made)).first->second;
  try {
    loop_.watch(kept.link->fd(), EPOLLIN, kept);
  } catch (...) { // nobody will read it, but its peer has to learn why
    kept.reads = false;
    tellNews(kept);
    throw;
  }
  membership_.alive(peer, Clock::now());
  tellNews(kept);
  missing_.connected(peer);
  if (kept.link->buffered()) { // it came with the peer's Hello, or with its reply
    linkReady(kept, EPOLLIN);
  }
}

void ControlPlane::notice(const ErrorRecord& record) {
  membership_.noticed(record, Clock::now());
  act();
}

void ControlPlane::doubt(const ErrorRecord& record) {
  membership_.doubted(record, Clock::now());
  act();
}

void ControlPlane::peerLeft(int peer) {
  membership_.saidGoodbye(peer);
  act();
}

void ControlPlane::onThrown(const std::exception_ptr& exception) noexcept {
  try {
    membership_.noticed(recordInAnyCase(identity_, [&] { return recordOfThrown(exception, identity_); }), Clock::now());
    act();
  } catch (...) { // no memory even to say so
    unreported_.keep(-1, exception);
  }
}

void ControlPlane::died(int peer) {
  PYCOMM_FAULT_POINT("control.died");
  const auto found = links_.find(peer);
  if (found != links_.end()) {
    // What it wrote before its end has arrived: a goodbye, or a report that tells more than the end does.
    linkReady(*found->second, EPOLLIN);
  }
  membership_.controlClosed(peer, kEndedByKernel, Clock::now());
  act();
}

void ControlPlane::onReady(uint32_t) {
  poll();
}

void ControlPlane::poll() {
  for (const auto& acceptor : acceptors_) {
    for (Accepted& accepted : acceptor->poll(Clock::now())) {
      Loop::guarded(static_cast<Loop::Handler&>(*this), [&] { welcome(std::move(accepted)); });
    }
  }
}

void ControlPlane::welcome(Accepted accepted) {
  switch (accepted.hello.purpose) {
    case LinkPurpose::Control: {
      // Of each pair the lower rank connects, and only neighbours do.
      const int peer = accepted.hello.rank;
      if (peer < identity_.rank && membership_.isNeighbour(peer)) {
        adopt(peer, std::move(accepted.link));
      }
      break;
    }
    case LinkPurpose::Bulk:
      events_.bulk_link(accepted.hello, std::move(accepted.link));
      break;
  }
}

// While groups form, a rank may fail before it has all its links.
void ControlPlane::tellNews(ControlLink& link) {
  const std::vector<ErrorRecord> news = membership_.news();
  if (news.empty()) {
    return;
  }
  try {
    for (const ErrorRecord& record : news) {
      sendTo(link, header(FrameType::Failure), record.serialize());
    }
    flush(link);
  } catch (const Error& error) {
    writingBroke(link, error);
    act();
  }
}

void ControlPlane::linkReady(ControlLink& link, uint32_t events) {
  if (link.down) {
    return;
  }
  try {
    if (link.reads && (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0) {
      bool open = link.in.read();
      while (open && !link.down &&
             link.link->buffered()) { // the kernel has no more of it, so nothing would wake this loop
        open = link.in.read();
      }
      if (!open && !link.down) {
        dropLink(link, "the connection was closed", false);
      }
    }
  } catch (const Error& error) {
    linkBroke(link, error);
  } catch (...) { // no memory: nothing wakes this loop for what the kernel no longer has
    link.read_again = Clock::now() + kReadAgain;
    throw;
  }
  if (!link.down && (events & EPOLLOUT) != 0) {
    flushOrDrop(link);
  }
  flushAll(); // what it brought may be for others
  act();
}

// What the peer wrote before its end can still be read: a goodbye, or a report that tells more than the end does.
void ControlPlane::writingBroke(ControlLink& link, const Error& error) {
  try {
    while (link.reads && link.in.read() && link.in.moved()) {
    }
  } catch (const Error& last) {
    if (last.record().code != ErrorCode::ConnectionReset) {
      linkBroke(link, last);
      return;
    }
  }
  linkBroke(link, error);
}

void ControlPlane::linkBroke(ControlLink& link, const Error& error) {
  const ErrorCode code = error.record().code;
  const bool corrupt = code == ErrorCode::DataCorrupt;
  if (code == ErrorCode::ConnectionReset || (corrupt && membership_.hasLeft(link.peer))) {
    dropLink(link, error.record().cause.empty() ? error.record().summary : error.record().cause, true);
    return;
  }
  loop_.unwatch(link.link->fd());
  if (!std::exchange(link.reads, false)) {
    link.down = true; // nor can it be written
    return;
  }
  link.waits_for_room = false; // the next flush() watches it again if so
  ErrorRecord record = corrupt ? changedOnTheWay(link.peer, error.record(), identity_)
                               : recordOfThrown(std::make_exception_ptr(error), identity_);
  if (!corrupt && !isOwnTrouble(record.code)) { // bytes that no pycomm sends
    identity_.blame(record, link.peer);
  }
  membership_.noticed(std::move(record), Clock::now());
}

void ControlPlane::dropLink(ControlLink& link, const std::string& cause, bool broke) {
  link.down = true;
  loop_.unwatch(link.link->fd());
  membership_.controlClosed(link.peer, cause, Clock::now(), broke);
}

void ControlPlane::sendTo(ControlLink& link, const FrameHeader& header, const std::string& payload) {
  OutFrame frame;
  frame.header = header;
  if (!payload.empty()) {
    frame.header.payload_nbytes = static_cast<uint32_t>(payload.size());
    frame.staging = staging_.take(payload.size());
    std::memcpy(frame.staging.view().ptr, payload.data(), payload.size());
    frame.payload = frame.staging.view();
  }
  link.out.push(std::move(frame));
}

void ControlPlane::flush(ControlLink& link) {
  PYCOMM_FAULT_POINT("control.send");
  std::vector<OutFrame> sent;
  const bool left = link.out.flush(sent);
  if (left != link.waits_for_room) {
    if (link.reads || left) {
      loop_.watch(link.link->fd(), (link.reads ? EPOLLIN : 0U) | (left ? EPOLLOUT : 0U), link);
    } else {
      loop_.unwatch(link.link->fd());
    }
    link.waits_for_room = left; // only now: what nobody watches is flushed again
  }
}

// Until it succeeds: without memory it may throw, and then the next tick tries again.
void ControlPlane::tellFailure() {
  if (untold_) {
    PYCOMM_FAULT_POINT("control.failed");
    events_.failed(*untold_);
    untold_.reset();
    missing_.failed();
  }
}

// What throws is done again: ranks pass over a report or a goodbye that they know.
void ControlPlane::act() {
  const auto isFail = [](const Membership::Action& action) { return action.kind == Membership::Action::Kind::Fail; };
  for (;;) {
    if (undone_.empty()) {
      undone_ = membership_.takeActions();
    }
    if (const auto fail = std::find_if(undone_.begin(), undone_.end(), isFail); fail != undone_.end()) {
      untold_ = std::move(fail->record);
      undone_.erase(fail);
    }
    if (!untold_ && undone_.empty()) {
      return;
    }
    tellFailure();
    while (!undone_.empty()) {
      tell(undone_.front());
      undone_.erase(undone_.begin());
    }
    flushAll();
  }
}

void ControlPlane::tell(const Membership::Action& action) {
  using Kind = Membership::Action::Kind;
  const bool leaves = action.kind == Kind::Left || action.kind == Kind::Leaving;
  const bool has_record = action.kind == Kind::Flood || action.kind == Kind::Leaving;
  FrameHeader head = header(typeOf(action.kind));
  head.root = leaves ? action.left : -1;
  const std::string payload = has_record ? action.record.serialize() : "";
  for (const auto& entry : links_) {
    ControlLink& link = *entry.second;
    // A rank that leaves knows it, and one that has left needs no goodbyes.
    const bool gone = leaves && (entry.first == action.left || membership_.hasLeft(entry.first));
    const bool full = action.kind == Kind::Heartbeat && link.waits_for_room; // what waits shows as much
    if (link.down || entry.first == action.except || gone || full) {
      continue;
    }
    try {
      sendTo(link, head, payload);
    } catch (const Error& error) {
      linkBroke(link, error);
    }
  }
}

void ControlPlane::leaving(const ErrorRecord& why) {
  membership_.willLeave(identity_.rank, why, -1);
  act();
}

std::optional<ErrorRecord> ControlPlane::trouble() const {
  for (const auto& acceptor : acceptors_) {
    if (acceptor->trouble()) {
      return acceptor->trouble();
    }
  }
  return std::nullopt;
}

TimePoint ControlPlane::nextTick() const noexcept {
  TimePoint next = std::min(unreported_.due(), membership_.nextTick());
  if (unreported_.due() == TimePoint::max() && (untold_ || !undone_.empty())) {
    next = Loop::Ticker::kAtOnce; // what an exception left over that never came to onThrown()
  }
  for (const auto& acceptor : acceptors_) {
    next = std::min(next, acceptor->nextDeadline());
  }
  for (const auto& entry : links_) {
    next = std::min(next, entry.second->read_again);
  }
  return next;
}

void ControlPlane::tick(TimePoint now) {
  for (const auto& entry : links_) {
    ControlLink& link = *entry.second;
    if (link.read_again <= now) {
      link.read_again = TimePoint::max();
      Loop::guarded(link, [&] { linkReady(link, EPOLLIN); });
    }
  }
  membership_.tick(now); // before act(), which may throw: its next one lies in the future then
  unreported_.tryAgain(now, [this](int, const std::exception_ptr& exception) { onThrown(exception); });
  for (const auto& acceptor : acceptors_) {
    if (acceptor->nextDeadline() <= now) {
      poll();
    }
    // Peers wait at the endpoint of a process that has no descriptor for them as long as they try.
    if (acceptor->troubleSince() != TimePoint::max() &&
        now - acceptor->troubleSince() >= std::chrono::milliseconds(kOneTryMs)) {
      membership_.noticed(cannotAccept(*acceptor->trouble(), identity_), now);
    }
  }
  act();
}

} // namespace pycomm
