#include "proof/sim/plan.h"

#include <algorithm>

namespace pycomm::sim {
namespace {

Network::Weather drawWeather(Random& random, bool prompt) {
  Network::Weather weather;
  if (prompt) {
    weather.latency_low = microseconds(random.scaled(1, 100));
    weather.latency_high = weather.latency_low + microseconds(random.scaled(0, 300));
  } else {
    weather.latency_low = microseconds(random.scaled(10, 10000));
    weather.latency_high = weather.latency_low + microseconds(random.scaled(0, 60000));
  }
  weather.room_low = random.scaled(128, 1024);
  weather.room_high = weather.room_low + random.scaled(0, 16384);
  weather.short_write_percent = static_cast<int>(random.scaled(0, 60));
  weather.nanos_per_byte = random.chance(30) ? static_cast<double>(random.scaled(1, 1000)) : 0;
  return weather;
}

// The same proportions as the real limits: the pool is a quarter of the window, an edge's room is half of it.
Limits drawLimits(Random& random) {
  Limits limits;
  limits.window_nbytes = int64_t{512} << random.below(5);
  limits.eager_pool_nbytes = limits.window_nbytes / 4;
  limits.eager_nbytes = limits.eager_pool_nbytes >> random.within(1, 4);
  limits.frame_nbytes = limits.eager_pool_nbytes / 16; // a lead of 16 frames fills the pool
  limits.max_ahead = 4;
  limits.max_asking = 4;
  return limits;
}

SimLoop::Pace drawPace(Random& random, bool slow) {
  SimLoop::Pace pace;
  pace.turn_high = microseconds(random.scaled(5, slow ? 10000 : 50));
  return pace;
}

} // namespace

const char* faultName(FaultKind kind) noexcept {
  switch (kind) {
    case FaultKind::Kill:
      return "kill";
    case FaultKind::Stop:
      return "stop";
    case FaultKind::Reset:
      return "reset";
    case FaultKind::BlockPair:
      return "block_pair";
    case FaultKind::BlockOut:
      return "block_out";
    case FaultKind::BlockIn:
      return "block_in";
    case FaultKind::Isolate:
      return "isolate";
    case FaultKind::Late:
      return "late";
    case FaultKind::Sleep:
      return "sleep";
    case FaultKind::Mismatch:
      return "mismatch";
    case FaultKind::Leave:
      return "leave";
    case FaultKind::Abort:
      return "abort";
    case FaultKind::LeaveNow:
      return "leave_now";
  }
  return "unknown";
}

namespace {

Plan drawPlan(uint64_t seed, const GroupFrame* frame) {
  // Streams of their own: a change in how one part is drawn leaves the others as they were.
  Random root(seed);
  Random shape = root.fork();
  Random calls = root.fork();
  Random paces = root.fork();
  Random faults = root.fork();
  Random extras = root.fork();
  Random leaving = root.fork();

  Plan plan;
  plan.seed = seed;
  plan.size = static_cast<int>(shape.chance(5) ? shape.within(10, 17) : shape.within(2, 9));
  plan.prompt = !shape.chance(15);
  plan.weather = drawWeather(shape, plan.prompt);
  if (frame != nullptr) {
    plan.size = frame->size;
    plan.prompt = frame->prompt;
    plan.weather = frame->weather;
  }
  plan.limits = drawLimits(shape);
  const int64_t most = frame != nullptr ? 4 : 10; // several groups have enough to do together
  const int count = static_cast<int>(plan.size > 9 ? shape.within(1, 3) : shape.scaled(1, most));
  for (int key = 0; key < count; ++key) {
    plan.program.push_back(drawCall(calls, key, plan.size, plan.limits.window_nbytes));
  }
  const bool tagged = shape.chance(50);
  const bool overlapping = shape.chance(60);
  for (CallPlan& call : plan.program) {
    call.tag = tagged ? 1000 + static_cast<uint32_t>(call.key) : 0;
    call.waits = !overlapping || calls.chance(30);
  }
  const int slow = paces.chance(20) ? static_cast<int>(paces.below(plan.size)) : -1;
  for (int rank = 0; rank < plan.size; ++rank) {
    RankPlan mine;
    mine.data_loop_pace = drawPace(paces, rank == slow);
    mine.goes_on_after_error = paces.chance(20);
    mine.closes_after = microseconds(paces.scaled(0, 30000));
    const int64_t think_us = paces.scaled(0, rank == slow ? 20000 : 1000);
    for (CallPlan call : plan.program) {
      call.request.rank = rank;
      call.think = microseconds(paces.scaled(0, think_us));
      if (call.request.kind == Collective::AllToAll && !call.request.counts.empty()) {
        call.request.counts = allToAllCounts(call.key, rank, plan.size, false);
        call.request.recv_counts = allToAllCounts(call.key, rank, plan.size, true);
      }
      mine.calls.push_back(std::move(call));
    }
    plan.ranks.push_back(std::move(mine));
  }
  const int64_t dice = faults.below(100);
  const int64_t many = (frame != nullptr && !frame->faulty) || dice < 25 ? 0 : dice < 85 ? 1 : faults.within(2, 3);
  for (int64_t i = 0; i < many; ++i) {
    drawFault(faults, plan);
  }
  if (seed >= kLeavingSeeds && frame == nullptr && plan.faults.empty()) {
    drawLeaving(leaving, plan);
  }
  if (seed >= kRichSeeds) {
    drawExtras(extras, plan);
  }
  return plan;
}

} // namespace

Plan makePlan(uint64_t seed) {
  return drawPlan(seed, nullptr);
}

Plan makePlan(uint64_t seed, const GroupFrame& frame) {
  return drawPlan(seed, &frame);
}

std::string Plan::text() const {
  std::string out = "seed " + std::to_string(seed) + ": " + std::to_string(size) + " ranks, " +
      (prompt ? "prompt" : "slow") + " network, window " + std::to_string(limits.window_nbytes) + " B, pool " +
      std::to_string(limits.eager_pool_nbytes) + " B, eager " + std::to_string(limits.eager_nbytes) + " B\n";
  for (const CallPlan& call : program) {
    out += "  call " + std::to_string(call.key + 1) + ": " + callText(call) + '\n';
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const CallPlan& call : ranks[rank].calls) {
      if (call.peer != kNoPeer) {
        out += "  rank " + std::to_string(rank) + ": " + callText(call) + '\n';
      }
    }
  }
  for (const FaultPlan& fault : faults) {
    out += std::string("  fault: ") + faultName(fault.kind) + " rank " + std::to_string(fault.rank);
    if (fault.other >= 0) {
      out += " and rank " + std::to_string(fault.other);
    }
    out += fault.after_frames >= 0 ? " after " + std::to_string(fault.after_frames) + " frames"
                                   : " at " + std::to_string(fault.at.count() / 1000) + " us";
    if (fault.duration.count() > 0) {
      out += " for " + std::to_string(fault.duration.count() / 1000) + " us";
    }
    out += (fault.text.empty() ? "" : ": " + fault.text) + '\n';
  }
  return out;
}

} // namespace pycomm::sim
