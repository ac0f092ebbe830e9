#include "proof/sim/user.h"

#include <algorithm>
#include <utility>

#include "engine/data/point_to_point.h"
#include "engine/operation/issue_context.h"
#include "proof/sim/oracle.h"
#include "schedule/make_schedule.h"

namespace pycomm::sim {
namespace {

uint32_t digestOf(const ScheduleRequest& request) {
  uint64_t digest = 0;
  if (request.kind != Collective::AllToAll) {
    for (const int64_t count : request.counts) {
      digest = mix64(digest ^ static_cast<uint64_t>(count + 1));
    }
  }
  return static_cast<uint32_t>(digest);
}

} // namespace

User::User(Timeline& timeline, SimGroup& group, int rank, const RankPlan& plan)
    : timeline_(timeline), group_(group), rank_(rank), plan_(plan) {}

void User::later(Nanos delay, std::function<void()> step) {
  timeline_.after(delay, [this, step = std::move(step)] {
    if (group_.dead()) {
      return;
    }
    if (stopped_) {
      delayed_.push_back(step);
    } else {
      step();
    }
  });
}

void User::resume() {
  stopped_ = false;
  for (const auto& step : std::exchange(delayed_, {})) {
    later(Nanos(0), step);
  }
}

void User::begin() {
  next();
}

void User::next() {
  if (leaving_) {
    return;
  }
  const bool gives_up = failed_ && !plan_.goes_on_after_error;
  if (gives_up || static_cast<int>(position_) == plan_.leaves_before) {
    leave(gives_up ? plan_.closes_after : Nanos(0));
    return;
  }
  if (position_ == plan_.calls.size()) {
    if (under_way_ == 0) {
      if (!failed_ && !group_.failure()) {
        usage_at_end_ = group_.usage();
      }
      leave(plan_.closes_after);
    } else {
      blocked_ = true;
    }
    return;
  }
  const CallPlan& call = plan_.calls[position_];
  later(call.think, [this, &call] {
    if (leaving_) {
      return;
    }
    if (static_cast<int>(position_) == plan_.aborts_before) {
      ErrorRecord reason;
      reason.code = ErrorCode::Aborted;
      reason.rank = reason.peer = rank_;
      reason.summary = "The user gave up.";
      group_.abort(std::move(reason));
    }
    ++position_;
    issue(call);
    if (call.waits) {
      blocked_ = true;
    } else {
      next();
    }
  });
}

void User::issue(const CallPlan& call) {
  auto outcome = std::make_unique<Outcome>();
  outcome->call = call;
  outcome->issued = timeline_.now();
  outcome->group_had_failed = group_.failure().has_value();
  auto memory = std::make_unique<Memory>();
  memory->input = inputOf(call, rank_);
  memory->output.assign(
      static_cast<size_t>(outputNumel(call.request)) * elementSize(call.request.dtype), std::byte{0x5a});
  const size_t index = outcomes_.size();

  Operation::Request request;
  request.schedule = prepare(makeSchedule(call.request));
  Descriptor& descriptor = request.descriptor;
  descriptor = Descriptor::of(call.request, request.schedule->schedule.algorithm);
  request.extras().codec_counters = call.request.codec == Codec::None ? nullptr : codec_counters_;
  descriptor.tag = call.tag;
  descriptor.digest = digestOf(call.request);
  const bool root = call.request.kind != Collective::Broadcast || call.request.root == rank_;
  if (call.in_place && root) {
    memory->output = memory->input;
  }
  request.output = {memory->output.data(), memory->output.size()};
  request.input =
      call.in_place ? ConstBufferView(request.output) : ConstBufferView(memory->input.data(), memory->input.size());
  if (call.peer != kNoPeer) {
    nameMessage(request, call);
  } else {
    ++collectives_;
    request.id = {collectives_, static_cast<int64_t>(collectives_)};
  }
  request.deadline = Deadline::after(call.timeout_ms);
  outcome->descriptor = descriptor;
  outcome->op_id = request.id.id;

  if (on_event_) {
    on_event_("issues call " + std::to_string(index + 1) + ": " + callText(call));
  }
  auto operation = std::make_shared<Operation>(std::move(request));
  outcomes_.push_back(std::move(outcome));
  operations_.push_back(operation);
  memory_.push_back(std::move(memory));
  ++under_way_;
  operation->onDone([this, index] { ended(index); });
  group_.post(operation);
}

// As in Issuer::fillMessage: both sides have the descriptor of the send, and the data loop matches messages.
void User::nameMessage(Operation::Request& request, const CallPlan& call) const {
  request.receives = call.request.kind == Collective::Recv;
  request.peer = call.peer;
  request.descriptor.kind = Collective::Send;
  request.descriptor.algorithm = Algorithm::Direct;
  request.descriptor.root = -1;
  if (call.peer == PointToPoint::kAnyRank) {
    request.schedule = nullptr;
  }
}

const Outcome* User::collective(uint64_t op_id) const noexcept {
  const auto found = std::find_if(
      outcomes_.begin(), outcomes_.end(), [op_id](const auto& outcome) { return outcome->op_id == op_id; });
  return found == outcomes_.end() ? nullptr : found->get();
}

void User::ended(size_t index) {
  Outcome& outcome = *outcomes_[index];
  outcome.ended = timeline_.now();
  const Operation& operation = *operations_[index];
  outcome.error = operation.error();
  outcome.descriptor = operation.request().descriptor; // of a message: as it was matched
  outcome.name = operation.request().id.id;
  if (operation.request().receives && operation.identified()) {
    outcome.sender = outcome.descriptor.root;
  }
  const std::unique_ptr<Memory> memory = std::move(memory_[index]);
  outcome.output = memory->output; // a copy: the memory itself is reused now
  outcome.input_altered = memory->input != inputOf(outcome.call, rank_);
  outcome.memory.emplace_back(std::move(memory->input));
  outcome.memory.emplace_back(std::move(memory->output));
  --under_way_;
  failed_ = failed_ || outcome.error.has_value();
  if (on_event_) {
    on_event_("ends call " + std::to_string(index + 1) + (outcome.error ? ": " + outcome.error->text() : ": done"));
  }
  // The program's thread wakes a little later than the data loop that ended the operation.
  later(microseconds(2), [this, index] {
    operations_[index].reset();
    if (blocked_ && (under_way_ == 0 || failed_)) {
      blocked_ = false;
      next();
    }
  });
}

void User::leaveNow() {
  if (!leaving_) {
    blocked_ = false;
    leave(Nanos(0));
  }
}

void User::leave(Nanos delay) {
  leaving_ = true;
  later(delay, [this] {
    closing_since_ = timeline_.now();
    if (on_event_) {
      on_event_("closes its group");
    }
    group_.close([this] { closed_ = true; });
  });
}

} // namespace pycomm::sim
