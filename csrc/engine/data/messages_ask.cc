// The questions of receives: a receive that waits asks for its message.
#include <algorithm>
#include <exception>
#include <vector>

#include "engine/data/data_plane.h"
#include "engine/data/messages.h"
#include "engine/data/waiting.h"

namespace pycomm {
namespace {

using std::chrono::milliseconds;

// How many receives may ask before this rank pauses, so that questions take neither its time nor that of a rank that it asks.
constexpr size_t kMaxAsks = 256;
constexpr milliseconds kAsksPause(10);
// How many messages one question brings.
constexpr size_t kMaxWanted = 64;

// A receive asks for its message when any operation first asks, and then each time eight times later, at last each kSayAgain.
milliseconds firstAsk(const Tables& tables) noexcept {
  return milliseconds(tables.limits.waiting_after_ms);
}

} // namespace

size_t Messages::mostAnnounced(const SendQueue& queue) const noexcept {
  const size_t room = tables_.limits.max_ahead / 2;
  return queue.maybe_announced.size() < room ? std::min(kMaxWanted, room - queue.maybe_announced.size()) : 0;
}

// A receiver waits for messages under a tag. If some are queued here they go before what fills its pool: they are announced, and it
// gives them credit. If none is, it is answered, and the next message under that tag begins at once.
void Messages::asked(int peer, const FrameHeader& header) {
  if (header.type == FrameType::NotEntered) {
    tables_.peer(peer).lacked = waiting::lastText(header, peer, identity_.job);
    tables_.peer(peer).asked -= tables_.peer(peer).asked > 0 ? 1 : 0;
    return;
  }
  SendQueue& queue = queueOf(peer);
  const size_t most = std::max<size_t>(mostAnnounced(queue), 1); // one it has a receive for
  std::vector<std::shared_ptr<Operation>> wanted;
  wanted.reserve(most); // what is taken out of the queue must not be lost to an exception
  while (wanted.size() < most) {
    std::shared_ptr<Operation> message = queue.takeUnder(header.tag);
    if (message == nullptr) {
      break;
    }
    wanted.push_back(std::move(message));
  }
  data_loop_.addBusy(-static_cast<int>(wanted.size()));
  std::exception_ptr thrown;
  for (const std::shared_ptr<Operation>& message : wanted) {
    try {
      begin(message, true);
    } catch (...) {
      thrown = std::current_exception();
    }
  }
  if (thrown != nullptr) {
    std::rethrow_exception(thrown);
  }
  if (wanted.empty()) {
    queue.miss(header.tag);
    waiting::answerNotEntered(tables_, peer, PointToPoint::kAskId, Action::Way::BulkLink);
  }
}

void Messages::ask(int peer, uint32_t tag) {
  FrameHeader question;
  question.type = FrameType::Waiting;
  question.group = identity_.hash;
  question.epoch = identity_.epochOnWire();
  question.op_id = PointToPoint::kAskId;
  question.kind = static_cast<uint8_t>(Collective::Send);
  question.root = peer;
  question.tag = tag;
  PeerRow& row = tables_.peer(peer);
  // However many are lost, what the peer may announce has a bound.
  row.asked = std::min(row.asked + 1, tables_.limits.places());
  plane_.send(peer, question, Action::Way::BulkLink); // it may be lost: the receive asks again
}

// Also if an earlier receive from that rank under that tag has waited for long: its pause is not that of the next.
void Messages::askSoon(int from, uint32_t tag) {
  const auto found = asks_of_.find({from, tag});
  if (found != asks_of_.end() && found->second->second.pause == firstAsk(tables_)) {
    return; // it is due soon
  }
  const uint64_t oldest = names_.oldestUnder(tag, from);
  if (oldest == 0 || (found != asks_of_.end() && found->second->second.ticket == oldest)) {
    return;
  }
  const Ask ask{from, tag, oldest, firstAsk(tables_)};
  const Asks::iterator at = asks_.emplace(Clock::now() + ask.pause, ask);
  if (found != asks_of_.end()) {
    asks_.erase(found->second);
    found->second = at;
    return;
  }
  try {
    asks_of_.emplace(std::make_pair(from, tag), at);
  } catch (...) {
    asks_.erase(at);
    throw;
  }
}

void Messages::askWhatIsDue(TimePoint now) {
  if (now < asks_from_) {
    return;
  }
  for (size_t asked = 0; !asks_.empty() && asks_.begin()->first <= now;) {
    if (asked == kMaxAsks) {
      asks_from_ = now + kAsksPause;
      return;
    }
    auto node = asks_.extract(asks_.begin());
    Ask& due = node.mapped();
    const uint64_t oldest = names_.oldestUnder(due.tag, due.from);
    if (oldest == 0) {
      asks_of_.erase({due.from, due.tag});
      continue;
    }
    const bool waits_long = oldest == due.ticket;
    due.pause = waits_long ? std::min<milliseconds>(due.pause * 8, kSayAgain) : firstAsk(tables_);
    due.ticket = oldest;
    node.key() = now + due.pause;
    const Ask ask_for = due;
    asks_of_.find({due.from, due.tag})->second = asks_.insert(std::move(node));
    if (!waits_long) {
      continue;
    }
    ++asked;
    for (int peer = 0; peer < identity_.size; ++peer) {
      const PeerRow& row = tables_.peer(peer);
      const bool opened =
          row.reading != PeerRow::Reading::NotOpened; // a rank that never opened a link here has no message
      const bool may_have = ask_for.from == peer || (ask_for.from == PointToPoint::kAnyRank && opened);
      if (may_have && !row.isAway()) {
        ask(peer, ask_for.tag);
      }
    }
  }
}

void Messages::tick(TimePoint now) {
  askWhatIsDue(now);
  checkDeadlines(now);
}

TimePoint Messages::nextTick() const noexcept {
  return asks_.empty() ? next_deadline_ : std::min(next_deadline_, std::max(asks_.begin()->first, asks_from_));
}

} // namespace pycomm
