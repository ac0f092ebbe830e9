#include "engine/data/data_plane.h"

#include <algorithm>
#include <utility>

#include "engine/report/failure_text.h"

namespace pycomm {

DataPlane::DataPlane(GroupIdentity identity, Loop& lane, Events events, Options options)
    : identity_(std::move(identity)),
      options_(std::move(options)),
      lane_(lane),
      end_(identity_),
      reporter_(identity_, end_, std::move(events)),
      exchange_(identity_, options_.limits, options_, lane_, end_, reporter_) {
  lane_.addTicker(*this);
}

DataPlane::~DataPlane() {
  lane_.removeTicker(*this);
}

// ---- operations

void DataPlane::post(const std::shared_ptr<Operation>& operation) {
  // What belongs in shared memory comes here only when that is over, which is a little before all else is.
  if (!end_.running() || operation->request().descriptor.algorithm == Algorithm::SharedMemory) {
    end_.endAtOnce(*operation);
    return;
  }
  exchange_.guarded(-1, [&] { exchange_.post(operation); });
}

void DataPlane::hold(const std::shared_ptr<Operation>& operation) {
  if (!end_.running()) {
    end_.endAtOnce(*operation);
    return;
  }
  exchange_.guarded(-1, [&] { exchange_.hold(operation); });
}

void DataPlane::release(const std::shared_ptr<Operation>& operation) {
  if (exchange_.watched().release(operation)) {
    post(operation);
    return;
  }
  exchange_.guarded(-1, [&] { exchange_.inputArrived(operation->request().id.id); });
}

void DataPlane::hostStuck(const std::shared_ptr<Operation>& operation, uint64_t lacking) {
  if (end_.running()) {
    exchange_.guarded(-1, [&] { exchange_.stuck(operation, lacking); });
  }
}

void DataPlane::hostEnded(const OperationId& id, const Descriptor& descriptor) {
  if (end_.running()) {
    exchange_.guarded(-1, [&] { exchange_.hostEnded(id, descriptor); });
  }
}

void DataPlane::follow(const std::shared_ptr<Operation>& operation) {
  if (!end_.running()) {
    end_.endAtOnce(*operation);
    return;
  }
  exchange_.guarded(-1, [&] { exchange_.follow(operation); });
}

void DataPlane::followedEnded(uint64_t op_id, std::optional<ErrorRecord> error) {
  const std::shared_ptr<Operation> operation = exchange_.unfollow(op_id);
  if (operation == nullptr) {
    return; // the group has failed meanwhile
  }
  if (error) {
    operation->finish(recordInAnyCase(identity_, [&] { return errorOf(*operation, *error, identity_); }));
  } else {
    operation->finish(std::nullopt);
  }
}

// ---- links

void DataPlane::adopt(int peer, std::unique_ptr<Link> link) {
  exchange_.guarded(peer, [&] {
    if (end_.running()) {
      exchange_.links().adopt(peer, std::move(link));
    }
  });
}

void DataPlane::adoptShared(int peer, std::unique_ptr<Link> link) {
  exchange_.guarded(peer, [&] {
    if (end_.running()) {
      exchange_.links().adoptShared(peer, std::move(link));
    }
  });
}

void DataPlane::shareRings(HostRings rings) {
  exchange_.links().shareRings(std::move(rings));
}

void DataPlane::useRings(bool all_have_them) {
  exchange_.guarded(-1, [&] { exchange_.links().useRings(all_have_them); });
}

void DataPlane::peerLeft(int peer) {
  exchange_.departures().saidGoodbye(peer);
}

void DataPlane::heardQuestion(int peer, const FrameHeader& question) {
  exchange_.guarded(peer, [&] { exchange_.heardQuestion(peer, question); });
}

// ---- the end

void DataPlane::fail(const ErrorRecord& cause, const std::function<void(const ErrorRecord&)>& told) noexcept {
  if (!end_.fail(cause, Clock::now())) {
    return;
  }
  exchange_.links().stop();
  const OperationEnds& ends = exchange_.ends();
  try {
    const std::optional<ErrorRecord> oldest = told == nullptr ? std::nullopt : ends.errorOfOldest(cause);
    if (oldest) {
      told(*oldest);
    }
  } catch (...) { // no memory to say it: the group's cause itself is known
  }
  exchange_.ends().endAll(
      [&](const Operation& operation, const OperationRow* row) { return ends.errorIn(operation, row, cause); });
}

void DataPlane::close(const ErrorRecord& reason, std::function<void()> closed) noexcept {
  const Operation* const unfinished = end_.failed() ? nullptr : exchange_.ends().unfinished();
  if (unfinished != nullptr) {
    try {
      reporter_.notice(leftInTheMiddle(*unfinished, identity_));
    } catch (...) { // no memory to say so: the others find that this rank has left
    }
  }
  end_.close(reason, std::move(closed), Clock::now());
  if (end_.failed()) {
    return; // every operation has ended with that
  }
  exchange_.ends().endAll(
      [&](const Operation& operation, const OperationRow*) { return errorOf(operation, reason, identity_); });
  if (exchange_.links().sayGoodbyes()) {
    end_.goodbyesQueued(exchange_.links().isClosing(), Clock::now());
  }
}

// ---- time

TimePoint DataPlane::nextTick() const noexcept {
  return std::min(exchange_.nextTick(), end_.endsAt());
}

void DataPlane::tick(TimePoint now) {
  if (end_.endsAt() <= now) {
    const std::function<void()> closed = end_.end();
    exchange_.links().stop();
    closed();
    return; // the owner may be gone
  }
  exchange_.guarded(-1, [&] { exchange_.tick(now); });
  exchange_.ends().endLate(now);
}

Loop::Ticker::Look DataPlane::look() {
  looked_.clear(); // reading may change transfers
  return exchange_.addDuePeers(looked_) ? exchange_.links().look(looked_) : Look::Nothing;
}

} // namespace pycomm
