#include "engine/group.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "engine/host/host_transfer.h"
#include "engine/report/failure_text.h"
#include "schedule/make_schedule.h"
#include "schedule/request_checks.h"
#include "schedule/select.h"

namespace pycomm {
namespace {

// A training step has a few tens of distinct calls; a schedule of a large ring takes some hundred kilobytes.
constexpr size_t kCachedSchedules = 64;

bool same(const ScheduleRequest& a, const ScheduleRequest& b) {
  return a.kind == b.kind && a.algorithm == b.algorithm && a.root == b.root && a.dtype == b.dtype &&
      a.codec == b.codec && a.reduce_op == b.reduce_op && a.numel == b.numel && a.segment_nbytes == b.segment_nbytes &&
      a.counts == b.counts && a.recv_counts == b.recv_counts && a.pipeline_frames == b.pipeline_frames;
}

bool hasExtras(const Group::Call& call) {
  return call.schedule.codec != Codec::None || !call.input_parts.empty() || !call.output_parts.empty() ||
      call.schedule.reduce_op == ReduceOp::PremulSum || call.lost.ptr != nullptr || call.input_encoded ||
      call.output_encoded;
}

} // namespace

std::shared_ptr<const PreparedSchedule> Group::scheduleFor(const ScheduleRequest& request) {
  const std::lock_guard<std::mutex> lock(cache_mutex_);
  const auto found = std::find_if(
      cache_.begin(), cache_.end(), [&](const CachedSchedule& entry) { return same(entry.request, request); });
  if (found != cache_.end()) {
    cache_.splice(cache_.begin(), cache_, found);
    return cache_.front().prepared;
  }
  cache_.push_front(CachedSchedule{request, prepare(makeSchedule(request))});
  tellChoice(request, cache_.front().prepared->schedule.algorithm);
  if (cache_.size() > kCachedSchedules) {
    cache_.pop_back();
  }
  return cache_.front().prepared;
}

ScheduleRequest Group::ours(const ScheduleRequest& schedule) const {
  ScheduleRequest filled = schedule;
  filled.rank = identity_.rank;
  filled.size = identity_.size;
  filled.topology = topology_.get();
  return filled;
}

// Once for each collective and power of two: which algorithm, and why. With cache_mutex_.
void Group::tellChoice(const ScheduleRequest& request, Algorithm algorithm) {
  const bool chosen = request.kind != Collective::Send && request.kind != Collective::Recv && request.size > 1;
  if (!chosen || !logEnabled(LogLevel::Info)) {
    return;
  }
  const SelectionKey key = selectionKey(request);
  int size_class = 0;
  while (size_class < 62 && (int64_t{1} << size_class) < key.nbytes) {
    ++size_class;
  }
  if (!told_choices_.emplace(key.kind, size_class).second) {
    return;
  }
  const std::string why = request.algorithm != Algorithm::Auto ? "the algorithm option" : whySelected(key);
  log(LogLevel::Info,
      "group " + identity_.name + ": " + collectiveName(key.kind) + " of " + std::to_string(key.nbytes) +
          " bytes goes by " + algorithmName(algorithm) + ": " + why + " (" + topology_->text() + ")");
}

bool Group::servedByHost(const ScheduleRequest& schedule) const noexcept {
  return sharesMemory() && HostPlane::serves(schedule, identity_.size);
}

bool Group::reachesTensors() const noexcept {
  return sharesMemory() && planes_.host()->reachesTensors();
}

bool Group::keepsParts(const ScheduleRequest& schedule) {
  if (servedByHost(schedule)) {
    return schedule.kind == Collective::AllGather || schedule.kind == Collective::ReduceScatter;
  }
  return pycomm::keepsParts(schedule.kind, scheduleFor(ours(schedule))->schedule.algorithm);
}

void Group::fillCollective(Operation::Request& request, const Call& call) {
  request.schedule = scheduleFor(ours(call.schedule));
  request.descriptor.algorithm = request.schedule->schedule.algorithm;
  request.id = takeOperationId(counter_, identity_.hash);
}

// Messages are named on the lane, in the order in which it sees them: they take no number from the group's counter, as not all ranks
// take part.
void Group::fillMessage(Operation::Request& request, const Call& call) {
  request.receives = call.schedule.kind == Collective::Recv;
  request.peer = call.peer;
  request.descriptor.kind = Collective::Send;
  request.descriptor.algorithm = Algorithm::Direct;
  if (request.receives && call.peer == PointToPoint::kAnyRank) {
    return;
  }
  ScheduleRequest schedule = ours(call.schedule);
  schedule.root = call.peer;
  schedule.segment_nbytes = ScheduleRequest().segment_nbytes; // both sides must cut alike, whatever their options
  request.schedule = scheduleFor(schedule);
}

void Group::refuseInChild() const {
  if (!engine_.belongsToThisProcess()) {
    ErrorRecord record;
    record.code = ErrorCode::Forked;
    record.rank = identity_.rank;
    record.host = identity_.host(identity_.rank);
    record.group = identity_.name;
    record.summary =
        "A process group cannot be used in a child of fork(): its threads and connections belong to the parent.";
    record.hint = "start workers with the spawn method, or make a new process group in the child";
    throw Error(record);
  }
}

std::shared_ptr<Operation> Group::start(const Call& call) {
  try {
    return startChecked(call);
  } catch (const Error& error) {
    ErrorRecord record = errorOf(error.record(), identity_);
    record.op = record.op.empty() ? collectiveName(call.schedule.kind) : record.op;
    throw Error(record);
  }
}

FlightLog::Mark Group::recorded(const Operation& operation) const {
  const Operation::Request& request = operation.request();
  Descriptor descriptor = request.descriptor;
  if (descriptor.kind == Collective::Send) { // which message it is, is settled later
    descriptor.kind = request.receives ? Collective::Recv : Collective::Send;
    descriptor.root = request.peer;
    descriptor.digest = 0;
  }
  return FlightLog::issued(log_, request.id, descriptor, operation.issuedAt());
}

std::shared_ptr<Operation> Group::startChecked(const Call& call) {
  refuseInChild();
  Operation::Request request;
  request.descriptor =
      Descriptor::of(call.schedule, call.schedule.algorithm); // which algorithm it is, is settled below
  request.descriptor.tag = call.tag;
  request.input = call.input;
  request.output = call.output;
  request.deadline = call.deadline;
  if (hasExtras(call)) {
    Operation::Request::Extras& extras = request.extras();
    extras.codec_counters = call.schedule.codec == Codec::None ? nullptr : codec_counters_;
    extras.input_parts = call.input_parts;
    extras.output_parts = call.output_parts;
    extras.premul_factor = call.premul_factor;
    extras.lost = call.lost;
    extras.input_encoded = call.input_encoded;
    extras.output_encoded = call.output_encoded;
  }
  if (servedByHost(call.schedule)) {
    return startOnHost(std::move(request), call);
  }
  if (call.schedule.kind == Collective::Send || call.schedule.kind == Collective::Recv) {
    fillMessage(request, call);
  } else {
    fillCollective(request, call);
    if (call.held && call.in_pieces) {
      PieceFlow::Operand input{call.input.nbytes, PieceFlow::kPlain};
      PieceFlow::Operand output{call.output.nbytes, PieceFlow::kPlain};
      input.encoded_part = call.input_encoded ? call.schedule.numel : PieceFlow::kPlain;
      output.encoded_part = call.output_encoded ? call.schedule.numel : PieceFlow::kPlain;
      request.extras().pieces =
          PieceFlow::ofSchedule(*request.schedule, input, output, call.input.ptr == call.output.ptr);
    }
  }
  auto operation = std::make_shared<Operation>(std::move(request));
  operation->setMark(recorded(*operation));
  const Collective kind = call.schedule.kind;
  if (call.held) {
    onLane(&DataPlane::hold, operation, Pace::Soon);
  } else if (kind == Collective::Send || kind == Collective::Recv) { // torch does not say who waits for it
    onLane(&DataPlane::post, operation, kind == Collective::Send ? Pace::Here : Pace::HereAndPatient);
  } else {
    onLane(&DataPlane::post, operation, call.waits ? Pace::WhenDriven : Pace::Soon);
  }
  return operation;
}

std::shared_ptr<Operation> Group::startOnHost(Operation::Request request, const Call& call) {
  checkRequest(ours(call.schedule));
  request.descriptor.algorithm = Algorithm::SharedMemory;
  if (call.held && call.in_pieces) {
    request.extras().pieces = HostTransfer::piecesOf(request.descriptor, identity_.size);
  }
  std::shared_ptr<Operation> operation;
  const auto make = [&] {
    request.id = takeOperationId(counter_, identity_.hash);
    auto made = std::make_shared<Operation>(std::move(request));
    made->setMark(recorded(*made));
    made->makeShared().held.store(call.held, std::memory_order_relaxed);
    return made;
  };
  if (!planes_.host()->post(std::cref(make), call.waits, operation)) {
    onLane(&DataPlane::post, operation, call.waits ? Pace::WhenDriven : Pace::Soon); // which knows why it is over
  }
  return operation;
}

void Group::release(const std::shared_ptr<Operation>& operation, size_t pieces) {
  if (operation->done()) {
    return; // with the group, which the engine may not have outlived
  }
  if (PieceFlow* const flow = operation->request().extras().pieces.get()) {
    flow->arrive(std::min(pieces, flow->arriving().size()));
  }
  if (operation->shared().ticket != 0) {
    planes_.host()->release(*operation);
  } else {
    onLane(&DataPlane::release, operation, Pace::Soon);
  }
}

void Group::onLane(Planes::DataStep step, const std::shared_ptr<Operation>& operation, Pace pace) {
  auto begin =
      Loop::owned(planes_, [self = shared_from_this(), step, operation] { self->planes_.run(step, operation); });
  switch (pace) {
    case Pace::Soon:
      engine_.lane().post(std::move(begin));
      return;
    case Pace::WhenDriven:
      engine_.lane().postQuietly(std::move(begin));
      return;
    case Pace::Here:
    case Pace::HereAndPatient:
      engine_.lane().postHere(std::move(begin), pace == Pace::HereAndPatient);
      return;
  }
}

bool Group::wait(const Operation& operation, Deadline deadline) {
  if (!operation.done()) {
    refuseInChild();
  }
  if (operation.shared().ticket != 0) {
    if (!operation.done() && !planes_.host()->drive(operation, deadline)) {
      return operation.wait(deadline);
    }
    return operation.done();
  }
  EventLoop& lane = engine_.lane();
  if (operation.done() || lane.drive([&] { return operation.done(); }, deadline)) {
    return operation.done();
  }
  lane.nudge();
  return operation.wait(deadline);
}

} // namespace pycomm
