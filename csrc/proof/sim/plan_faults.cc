// Draws the faults of a plan.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "proof/sim/plan.h"
#include "schedule/make_schedule.h"

namespace pycomm::sim {
namespace {

bool accepted(const ScheduleRequest& request) {
  try {
    static_cast<void>(makeSchedule(request));
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// Changes one field of a call; returns the field's name, or "" if the change has no effect.
std::string alterField(Random& random, CallPlan& call) {
  ScheduleRequest changed = call.request;
  std::string what;
  switch (random.below(6)) {
    case 0:
      changed.dtype = changed.dtype == DType::Int32 ? DType::Float32 : DType::Int32; // often of the same size
      changed.codec = Codec::None;
      what = "dtype";
      break;
    case 1:
      changed.numel += 1;
      what = "numel";
      break;
    case 2:
      changed.reduce_op = changed.reduce_op == ReduceOp::Max ? ReduceOp::Sum : ReduceOp::Max;
      what = "reduce op";
      break;
    case 3:
      changed.root = (changed.root + 1) % changed.size;
      what = "root";
      break;
    case 4:
      changed.kind =
          random.pick({Collective::Broadcast, Collective::Barrier, Collective::AllReduce, Collective::Reduce});
      changed.root = 0;
      changed.counts.clear();
      changed.recv_counts.clear();
      changed.algorithm = Algorithm::Auto;
      changed.codec = Codec::None;
      if (changed.reduce_op == ReduceOp::None) {
        changed.reduce_op = ReduceOp::Sum;
      }
      what = "kind";
      break;
    default:
      call.tag += 1;
      call.altered = true;
      return "tag";
  }
  const bool reduces = changed.kind == Collective::AllReduce || changed.kind == Collective::Reduce ||
      changed.kind == Collective::ReduceScatter;
  const bool rooted = changed.kind == Collective::Broadcast || changed.kind == Collective::Reduce ||
      changed.kind == Collective::Gather || changed.kind == Collective::Scatter;
  const bool barrier = changed.kind == Collective::Barrier;
  if (what == "kind") {
    changed.reduce_op = reduces ? changed.reduce_op : ReduceOp::None;
    changed.root = rooted ? changed.root : -1;
    if (barrier) {
      changed.dtype = DType::UInt8;
      changed.numel = 0;
    }
  }
  const bool meaningless = (what == "reduce op" && !reduces) || (what == "root" && !rooted) ||
      (what == "numel" && (!changed.counts.empty() || barrier)) || (what == "dtype" && barrier) ||
      (what == "kind" && changed.kind == call.request.kind);
  if (meaningless || !accepted(changed)) {
    call.tag += 1;
    call.altered = true;
    return "tag";
  }
  call.request = changed;
  call.altered = true;
  return what;
}

std::string alterProgram(Random& random, Plan& plan, int rank) {
  std::vector<CallPlan>& calls = plan.ranks[static_cast<size_t>(rank)].calls;
  const auto at = static_cast<size_t>(random.below(static_cast<int64_t>(calls.size())));
  const std::string where = " of call " + std::to_string(at + 1);
  const int64_t dice = random.below(10);
  if (dice >= 7) {
    // Without names, a call that is left out or swapped with an equal one is a valid program with a different result.
    for (RankPlan& each : plan.ranks) {
      for (CallPlan& call : each.calls) {
        call.tag = 1000 + static_cast<uint32_t>(call.key);
      }
    }
  }
  if (dice == 7 && at + 1 < calls.size()) {
    std::swap(calls[at], calls[at + 1]);
    calls[at].altered = calls[at + 1].altered = true;
    return "calls " + std::to_string(at + 1) + " and " + std::to_string(at + 2) + " are swapped";
  }
  if (dice == 8) {
    calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(at));
    for (size_t i = at; i < calls.size(); ++i) {
      calls[i].altered = true;
    }
    return "call " + std::to_string(at + 1) + " is missing";
  }
  if (dice == 9) {
    CallPlan extra = calls[at];
    extra.key = -1;
    extra.tag = 900; // far from any other's, also if another fault adds one to it
    calls.insert(calls.begin() + static_cast<std::ptrdiff_t>(at), std::move(extra));
    for (size_t i = at; i < calls.size(); ++i) {
      calls[i].altered = true;
    }
    return "call " + std::to_string(at + 1) + " is one more";
  }
  return alterField(random, calls[at]) + where;
}

Nanos drawDuration(Random& random) {
  // Well below the 3 s after which silence counts, well above, and around.
  return random.chance(40) ? milliseconds(random.scaled(1, 2200))
      : random.chance(80)  ? milliseconds(random.within(3700, 8000))
                           : milliseconds(random.within(2200, 3700));
}

} // namespace

void drawFault(Random& random, Plan& plan) {
  FaultPlan fault;
  fault.kind = random.pick(
      {FaultKind::Kill,
       FaultKind::Kill,
       FaultKind::Stop,
       FaultKind::Stop,
       FaultKind::Reset,
       FaultKind::BlockPair,
       FaultKind::BlockOut,
       FaultKind::BlockIn,
       FaultKind::Isolate,
       FaultKind::Late,
       FaultKind::Mismatch,
       FaultKind::Mismatch,
       FaultKind::Mismatch,
       FaultKind::Leave,
       FaultKind::Abort});
  fault.rank = static_cast<int>(random.below(plan.size));
  if (random.chance(50)) {
    fault.after_frames = random.scaled(1, 400);
  } else {
    fault.at = microseconds(random.scaled(0, 20000));
  }
  RankPlan& mine = plan.ranks[static_cast<size_t>(fault.rank)];
  const auto some_call = static_cast<int>(random.below(static_cast<int64_t>(mine.calls.size())));
  switch (fault.kind) {
    case FaultKind::Kill:
      fault.duration = microseconds(random.scaled(0, 500000)); // the kernel frees memory first
      break;
    case FaultKind::Stop:
    case FaultKind::BlockPair:
    case FaultKind::BlockOut:
    case FaultKind::BlockIn:
    case FaultKind::Isolate:
      fault.duration = drawDuration(random);
      if (fault.kind != FaultKind::Stop && fault.duration > milliseconds(3700) && random.chance(50)) {
        fault.duration = std::chrono::hours(10);
      }
      fault.other = fault.kind == FaultKind::BlockPair
          ? static_cast<int>((fault.rank + 1 + random.below(plan.size - 1)) % plan.size)
          : -1;
      break;
    case FaultKind::Sleep:
      break; // see drawExtras
    case FaultKind::Reset:
      fault.other = static_cast<int>((fault.rank + 1 + random.below(plan.size - 1)) % plan.size);
      break;
    case FaultKind::Late: {
      if (mine.calls.empty()) {
        return;
      }
      const int64_t timeout_ms = random.within(300, 1500);
      for (RankPlan& each : plan.ranks) {
        for (CallPlan& call : each.calls) {
          call.timeout_ms = timeout_ms;
        }
      }
      mine.calls[static_cast<size_t>(some_call)].think = milliseconds(timeout_ms + random.within(500, 1500));
      break;
    }
    case FaultKind::Mismatch:
      if (mine.calls.empty()) {
        return;
      }
      fault.text = alterProgram(random, plan, fault.rank);
      break;
    case FaultKind::Leave:
      mine.leaves_before = some_call;
      break;
    case FaultKind::Abort:
      mine.aborts_before = some_call;
      break;
    case FaultKind::LeaveNow:
      break;
  }
  plan.faults.push_back(std::move(fault));
}

void drawLeaving(Random& random, Plan& plan) {
  FaultPlan fault;
  fault.kind = FaultKind::LeaveNow;
  fault.rank = static_cast<int>(random.below(plan.size));
  if (random.chance(70)) {
    fault.after_frames = random.scaled(1, 400);
  } else {
    fault.at = microseconds(random.scaled(0, 20000));
  }
  plan.faults.push_back(std::move(fault));
}

} // namespace pycomm::sim
