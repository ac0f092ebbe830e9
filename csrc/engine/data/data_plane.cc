#include "engine/data/data_plane.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fault_point.h"
#include "engine/data/leaving.h"
#include "engine/data/matching.h"
#include "engine/data/waiting.h"
#include "engine/report/failure_text.h"

namespace pycomm {

DataPlane::DataPlane(GroupIdentity identity, Loop& data_loop, Events events, Options options)
    : identity_(std::move(identity)),
      options_(std::move(options)),
      data_loop_(data_loop),
      events_(std::move(events)),
      staging_(data_loop.stagingMemory()),
      tables_(identity_, options_.limits),
      transfers_(tables_, staging_, data_loop, [this](int peer, OutFrame&& frame) { push(peer, std::move(frame)); }),
      links_(identity_, options_, data_loop, staging_, *this),
      messages_(tables_, data_loop, *this),
      watched_(tables_) {
  data_loop_.addTicker(*this);
}

DataPlane::~DataPlane() {
  data_loop_.removeTicker(*this);
}

template <typename Body>
void DataPlane::guarded(int peer, const Body& body) noexcept {
  try {
    body();
    flush();
    if (!questions_.empty() && running()) {
      events_.ask(std::exchange(questions_, {}));
    }
  } catch (...) {
    thrown(peer, std::current_exception());
  }
}

void DataPlane::run(int peer, void (*body)(const void* context), const void* context) noexcept {
  guarded(peer, [&] { body(context); });
}

template <typename Body>
void DataPlane::orRefuse(const std::shared_ptr<Operation>& operation, const Body& body) {
  try {
    body();
  } catch (...) {
    cannotBegin(operation);
    act(); // it may have been found to be a mismatch before
    throw;
  }
}

// ---- operations begin

void DataPlane::takeUp(const std::shared_ptr<Operation>& operation, Was was) {
  const Operation::Request& request = operation->request();
  // What belongs in shared memory comes here only when that is over, which is a little before all else is.
  if (!running() || request.descriptor.algorithm == Algorithm::SharedMemory) {
    endAtOnce(*operation);
    return;
  }
  guarded(-1, [&] {
    orRefuse(operation, [&] {
      PYCOMM_FAULT_POINT("operation.post");
      if (request.descriptor.kind == Collective::Send) {
        was == Was::Held ? messages_.release(operation) : messages_.post(operation);
        leaving::posted(tables_, request.schedule.get(), request.receives, Clock::now());
        act();
      } else {
        start(operation);
      }
    });
  });
}

void DataPlane::begin(const std::shared_ptr<Operation>& message) {
  orRefuse(message, [&] { start(message); });
}

void DataPlane::start(const std::shared_ptr<Operation>& operation) {
  const TimePoint now = Clock::now();
  OperationRow& row = transfers_.add(operation, now);
  act();
  if (tables_.failed) { // an unexpected frame does not fit it: it ends when the group's failure comes back
    return;
  }
  row.transfer->start();
  transfers_.replayUnexpected(row);
  leaving::posted(tables_, operation->request().schedule.get(), false, now);
  act();
  finishIfComplete(row);
}

void DataPlane::hold(const std::shared_ptr<Operation>& operation) {
  if (!running()) {
    endAtOnce(*operation);
    return;
  }
  guarded(-1, [&] {
    orRefuse(operation, [&] {
      if (operation->request().descriptor.kind == Collective::Send) {
        messages_.hold(operation);
      }
      watched_.hold(operation);
    });
  });
}

void DataPlane::release(const std::shared_ptr<Operation>& operation) {
  if (watched_.release(operation)) {
    takeUp(operation, Was::Held);
    return;
  }
  guarded(-1, [&] { // more of the input is here
    OperationRow* const row = tables_.find(operation->request().id.id);
    if (row != nullptr && row->runsHere()) {
      row->transfer->inputArrived();
      act();
      finishIfComplete(*row);
    }
  });
}

// ---- operations that run elsewhere

void DataPlane::hostStuck(const std::shared_ptr<Operation>& operation, uint64_t lacking) {
  if (running()) {
    guarded(-1, [&] {
      watched_.stuck(operation, lacking);
      act();
    });
  }
}

void DataPlane::hostEnded(const OperationId& id, const Descriptor& descriptor) {
  if (running()) {
    guarded(-1, [&] {
      watched_.hostEnded(id, descriptor);
      act();
    });
  }
}

void DataPlane::follow(const std::shared_ptr<Operation>& operation) {
  if (!running()) {
    endAtOnce(*operation);
    return;
  }
  guarded(-1, [&] {
    orRefuse(operation, [&] {
      watched_.follow(operation);
      act();
    });
  });
}

void DataPlane::followedEnded(uint64_t op_id, std::optional<ErrorRecord> error) {
  const auto found = tables_.entered.find(op_id);
  if (found == tables_.entered.end() || found->second.runs != OperationRow::Runs::Elsewhere) {
    return; // the group has failed meanwhile
  }
  const auto node = tables_.entered.extract(found);
  Operation& operation = *node.mapped().operation;
  endRow(node.mapped());
  if (error) {
    operation.finish(recordInAnyCase(identity_, [&] { return errorOf(operation, *error, identity_); }));
  } else {
    operation.finish(std::nullopt);
  }
}

// ---- peers come and go

void DataPlane::adopt(int peer, std::unique_ptr<Link> link, bool shared) {
  guarded(peer, [&] {
    if (!running()) {
      return;
    }
    if (shared) {
      links_.adoptShared(peer, std::move(link));
    } else {
      links_.adopt(peer, std::move(link));
    }
    noteReading(peer); // what the link has brought already may have ended it
  });
}

void DataPlane::shareRings(HostRings rings) {
  links_.shareRings(std::move(rings));
}

void DataPlane::useRings(bool all_have_them) {
  guarded(-1, [&] { links_.useRings(all_have_them); });
}

void DataPlane::peerLeft(int peer) {
  leaving::saidGoodbye(tables_, peer, Clock::now());
  act();
}

void DataPlane::noteReading(int peer) noexcept {
  using Reading = PeerRow::Reading;
  tables_.peer(peer).reading = links_.hasEnded(peer) ? Reading::Ended
      : links_.isOpened(peer)                        ? Reading::Open
                                                     : Reading::NotOpened;
}

void DataPlane::onReadingEnded(int peer, const Error& error) {
  noteReading(peer);
  leaving::readingEnded(tables_, peer, brokenLink(peer, error), Clock::now());
  act();
}

void DataPlane::onWritingBroke(int peer, const Error& error) {
  if (isOwnTrouble(error.record().code)) { // no memory, no descriptors: the peer has nothing to do with it
    thrown(-1, std::make_exception_ptr(error));
    return;
  }
  leaving::writingBroke(tables_, peer, brokenLink(peer, error), Clock::now());
  act();
}

ErrorRecord DataPlane::brokenLink(int peer, const Error& error) const {
  ErrorRecord record = peerGone(peer, error.record(), identity_);
  if (record.cause.empty()) {
    record.cause = error.record().summary;
  }
  return record;
}

// ---- frames arrive

void DataPlane::heardQuestion(int peer, const FrameHeader& question) {
  guarded(peer, [&] { static_cast<void>(onHeader(peer, question)); });
}

Sink DataPlane::onHeader(int peer, const FrameHeader& header) {
  Sink sink;
  if (!running() || tables_.failed || header.type == FrameType::Goodbye) {
    return sink;
  }
  const TimePoint now = Clock::now();
  PYCOMM_FAULT_POINT("frame.header");
  const bool ours = header.group == identity_.hash && header.epoch == identity_.epochOnWire();
  if (ours && header.op_id == PointToPoint::kAskId) {
    messages_.asked(peer, header);
    act();
    return sink;
  }
  OperationRow* row = tables_.find(header.op_id);
  if (ours && header.kind == static_cast<uint8_t>(Collective::Send)) {
    if (!messages_.arrived(peer, header, row != nullptr && row->runsHere())) {
      act();
      return sink;
    }
    row = row != nullptr ? row : tables_.find(header.op_id); // a receive that waited for it may have begun
  }
  if (row == nullptr) {
    watched_.recall(header);
    row = watched_.host() != nullptr ? tables_.find(header.op_id) : nullptr;
  }
  const matching::Verdict verdict = matching::headerArrived(tables_, row, peer, header, now);
  act();
  switch (verdict) {
    case matching::Verdict::Accept:
      row = tables_.find(header.op_id); // what was listed may have ended it
      if (row != nullptr && !tables_.failed) {
        sink = transfers_.place(*row, peer, header, now);
      }
      break;
    case matching::Verdict::Keep:
      sink = transfers_.placeUnexpected(header);
      break;
    case matching::Verdict::Ignore:
      messages_.beginQueued(peer); // it may have brought room
      break;
  }
  return sink;
}

void DataPlane::onFrame(int peer, const FrameHeader& header, Sink sink) {
  if (failure_) {
    return;
  }
  if (header.type == FrameType::Goodbye) { // also if Tables::failed: without it the end of the link is a death
    links_.endReading(peer);
    noteReading(peer);
    events_.left(peer);
    peerLeft(peer);
    return;
  }
  if (header.type == FrameType::Data && !tables_.failed &&
      transfers_.arrived(tables_.find(header.op_id), peer, header, std::move(sink))) {
    act();
    if (OperationRow* const row = tables_.find(header.op_id)) {
      finishIfComplete(*row);
    }
  }
}

// ---- frames leave

void DataPlane::onSent(const std::vector<OutFrame>& frames) {
  for (const OutFrame& frame : frames) {
    PYCOMM_FAULT_POINT("frame.written");
    sent(frame);
  }
  act();
}

void DataPlane::sent(const OutFrame& frame) {
  OperationRow* const row = frame.step < 0 ? nullptr : tables_.find(frame.header.op_id);
  if (row != nullptr && row->runsHere()) {
    row->transfer->sent(static_cast<uint32_t>(frame.step));
    finishIfComplete(*row);
  }
}

// Frames first: other ranks wait for them.
void DataPlane::flush() {
  while (!failure_ && (links_.flush() || work())) {
  }
}

bool DataPlane::work() {
  if (turn_left_ <= 0 || !hasWork()) {
    return false;
  }
  if (!to_self_.empty()) {
    deliverToSelf();
  }
  if (transfers_.hasWork()) {
    const Transfers::Worked worked = transfers_.work(static_cast<size_t>(std::max<int64_t>(turn_left_, 0)));
    turn_left_ -= static_cast<int64_t>(worked.nbytes);
    act();
    finishIfComplete(*worked.row);
  }
  return true;
}

void DataPlane::deliverToSelf() {
  const OutFrame frame = std::move(to_self_.front());
  to_self_.pop_front();
  FrameHeader header = frame.header;
  if (header.op_id != 0 && header.op_id != PointToPoint::kAskId) { // pool room and questions concern no operation
    header.op_id ^= PointToPoint::kSelfBit;
  }
  Sink sink = onHeader(identity_.rank, header);
  if (sink.into.nbytes > 0) {
    std::memcpy(sink.into.ptr, frame.payload.ptr, sink.into.nbytes);
    turn_left_ -= 2 * static_cast<int64_t>(sink.into.nbytes);
  }
  onFrame(identity_.rank, header, std::move(sink));
  sent(frame);
  act();
}

void DataPlane::push(int peer, OutFrame&& frame) {
  if (!running()) {
    return;
  }
  if (peer == identity_.rank) {
    to_self_.push_back(std::move(frame));
  } else {
    links_.send(peer, std::move(frame));
  }
}

void DataPlane::send(int peer, const FrameHeader& header, Action::Way way) {
  if (way == Action::Way::OpenLink && !links_.isWriting(peer)) {
    questions_.push_back(Question{peer, header});
    return;
  }
  OutFrame frame;
  frame.header = header;
  if (way == Action::Way::Needed || peer == identity_.rank) {
    push(peer, std::move(frame));
  } else if (running()) {
    links_.ask(peer, std::move(frame));
  }
}

// ---- what follows

void DataPlane::act() {
  while (!tables_.actions.empty() || !tables_.credit_actions.empty()) {
    for (Action& action : tables_.takeActions()) {
      take(action);
    }
  }
}

void DataPlane::take(Action& action) {
  switch (action.kind) {
    case Action::Kind::Send:
      send(action.peer, action.header, action.way);
      break;
    case Action::Kind::MaySend:
      if (const OperationRow* const row = tables_.find(action.op_id); row != nullptr && row->runsHere()) {
        row->transfer->roomCame(action.peer);
      }
      break;
    case Action::Kind::Notice:
      notice(std::move(action.record));
      break;
    case Action::Kind::Doubt:
      if (running()) {
        events_.doubted(std::move(action.record));
      }
      break;
    case Action::Kind::Overdue:
      overdue(action.op_id);
      break;
  }
}

void DataPlane::finishIfComplete(OperationRow& row) {
  if (!Transfers::isComplete(row)) {
    return;
  }
  auto node = tables_.entered.extract(row.id().id);
  const std::shared_ptr<Operation>& operation = node.mapped().operation;
  transfers_.ended();
  endRow(node.mapped());
  operation->finish(std::nullopt);
  messages_.ended(*operation); // begins others, which may throw
  letGo(node.mapped());
}

void DataPlane::letGo(OperationRow& row) noexcept {
  if (row.operation->request().schedule->nbytes >= kLargeNbytes) {
    row.transfer.reset();
    data_loop_.discard(std::move(row.operation));
  }
}

void DataPlane::overdue(uint64_t op_id) {
  OperationRow* const row = tables_.find(op_id);
  if (row == nullptr) {
    return;
  }
  std::optional<ErrorRecord> late = row->runsHere() ? std::optional(transfers_.overdue(*row)) : watched_.overdue(*row);
  if (late) {
    notice(std::move(*late));
  }
}

// ---- time

TimePoint DataPlane::nextTick() const noexcept {
  if (hasWork()) {
    return Loop::Ticker::kAtOnce;
  }
  return std::min(
      {ends_at_,
       waiting::nextTick(tables_),
       messages_.nextTick(),
       watched_.nextDeadline(),
       leaving::nextTick(tables_),
       links_.nextTick(),
       nextRefusedDeadline(),
       unreported_.due()});
}

void DataPlane::tick(TimePoint now) {
  if (ends_at_ <= now) {
    ends_at_ = TimePoint::max();
    if (!failure_) {
      failure_ = std::move(*closing_);
    }
    links_.stop();
    const std::function<void()> closed = std::exchange(closed_, nullptr);
    closed();
    return; // the owner may be gone
  }
  guarded(-1, [&] {
    turn_left_ = kWorkNbytes;
    waiting::tick(tables_, now);
    act();
    messages_.tick(now);
    for (ErrorRecord& late : watched_.overdueHeld(now)) {
      notice(std::move(late));
    }
    leaving::tick(tables_, now);
    act();
    links_.tick(now);
  });
  endRefusedLate(now);
  unreported_.tryAgain(now, [this](int peer, const std::exception_ptr& exception) { thrown(peer, exception); });
}

Loop::Ticker::Look DataPlane::look() {
  looked_.clear(); // reading may change transfers
  if (!transfers_.addDuePeers(looked_)) {
    return Look::Nothing;
  }
  for (int peer = 0; messages_.receives() && peer < identity_.size; ++peer) {
    if (messages_.waitsFor(peer)) {
      looked_.push_back(peer);
    }
  }
  return links_.look(looked_);
}

// ---- questions

DataPlane::Usage DataPlane::usage() const {
  Usage usage;
  static_cast<Messages::Usage&>(usage) = messages_.usage();
  usage.held = watched_.held();
  for (const auto& entry : tables_.entered) {
    const OperationRow& row = entry.second;
    usage.transfers += row.runsHere() ? 1 : 0;
    usage.on_host += row.runs == OperationRow::Runs::InSharedMemory ? 1 : 0;
    usage.followed += row.runs == OperationRow::Runs::Elsewhere ? 1 : 0;
    usage.unexpected_frames += row.unexpected.size();
  }
  for (const auto& entry : tables_.unexpected) {
    usage.unexpected_frames += entry.second.frames.size();
  }
  usage.frames = to_self_.size() + questions_.size();
  usage.refused = refused_.size();
  usage.shared_links = links_.sharedLinks();
  usage.staging_nbytes = staging_.takenNbytes();
  usage.tables = tables_.usage();
  return usage;
}

} // namespace pycomm
