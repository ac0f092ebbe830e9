// Additions for seeds from kRichSeeds on: messages between ranks, and codecs. They are drawn last and from a separate
// stream, so that the plans of smaller seeds, among them those of bugs fixed long ago, do not change.
#include <algorithm>

#include "base/codec.h"
#include "base/error.h"
#include "engine/data/point_to_point.h"
#include "proof/sim/plan.h"
#include "schedule/make_schedule.h"

namespace pycomm::sim {
namespace {

bool has(const Plan& plan, FaultKind kind) {
  return std::any_of(
      plan.faults.begin(), plan.faults.end(), [kind](const FaultPlan& fault) { return fault.kind == kind; });
}

/// Before the call with this key, or last.
void insertBefore(RankPlan& plan, int key, CallPlan call) {
  const auto at = std::find_if(plan.calls.begin(), plan.calls.end(), [key](const CallPlan& each) {
    return each.key == key && each.peer == kNoPeer;
  });
  const auto position = static_cast<int>(at - plan.calls.begin());
  if (!plan.calls.empty()) {
    call.timeout_ms = plan.calls.front().timeout_ms;
  }
  plan.leaves_before += plan.leaves_before > position ? 1 : 0;
  plan.aborts_before += plan.aborts_before > position ? 1 : 0;
  plan.calls.insert(at, std::move(call));
}

/// One rank receives from one to three others under one tag, all before the same call of the common program. So a
/// program that blocks for each message in turn ends. If several ranks send, or by chance, it receives them from any
/// rank.
void drawMessages(Random& random, Plan& plan, int key) {
  const auto receiver = static_cast<int>(random.below(plan.size));
  const auto senders = static_cast<int>(std::min<int64_t>(plan.size - 1, random.scaled(1, 3)));
  const auto first = static_cast<int>(random.below(plan.size - 1));
  // If a rank leaves, it is not known whether an open receive would have received from it.
  const bool from_any = !has(plan, FaultKind::Leave) && !has(plan, FaultKind::LeaveNow) && random.chance(50);
  const bool waits = random.chance(60);
  const auto before = static_cast<int>(random.below(static_cast<int64_t>(plan.program.size()) + 1));
  CallPlan call;
  call.key = key;
  call.tag = static_cast<uint32_t>(random.chance(50) ? 7 : key); // under one tag, their order distinguishes them
  call.waits = waits;
  call.request.size = plan.size;
  call.request.dtype = random.pick({DType::Float32, DType::Int64, DType::UInt8});
  call.request.segment_nbytes = plan.limits.window_nbytes / 4; // both sides cut alike
  call.request.numel = random.scaled(0, plan.limits.window_nbytes);
  if (from_any) {
    call.tag = static_cast<uint32_t>(key); // or else it might take what was meant for another receive
    // The engine itself segments receives from any rank, in pieces that are larger than the windows here.
    const auto element = static_cast<int64_t>(elementSize(call.request.dtype));
    call.request.numel = std::min(call.request.numel, call.request.segment_nbytes / element);
  }
  for (int i = 0; i < senders; ++i) {
    const int sender = (receiver + 1 + (first + i) % (plan.size - 1)) % plan.size;
    CallPlan send = call;
    send.request.kind = Collective::Send;
    send.request.rank = sender;
    send.peer = send.request.root = receiver;
    send.think = microseconds(random.scaled(0, 1000));
    insertBefore(plan.ranks[static_cast<size_t>(sender)], before, std::move(send));
    CallPlan receive = call;
    receive.request.kind = Collective::Recv;
    receive.request.rank = receiver;
    receive.request.root = sender;
    receive.peer = from_any ? PointToPoint::kAnyRank : sender;
    receive.think = microseconds(random.scaled(0, 1000));
    insertBefore(plan.ranks[static_cast<size_t>(receiver)], before, std::move(receive));
  }
}

/// One rank is far ahead of another: many small messages under one tag or two, or broadcasts, which their root need not
/// wait for. There are several times as many as the pool holds, so the bound on the lead is reached, and room and
/// credit come late.
void drawLead(Random& random, Plan& plan) {
  const bool messages = random.chance(60);
  // Sometimes more than the number of ended operations that are kept (Tables::kRecent).
  const auto many = static_cast<int>(random.chance(20) ? random.within(300, 400) : random.within(20, 80));
  const auto ahead = static_cast<int>(random.below(plan.size));
  const auto behind = static_cast<int>((ahead + 1 + random.below(plan.size - 1)) % plan.size);
  const auto before = static_cast<int>(random.below(static_cast<int64_t>(plan.program.size()) + 1));
  const Nanos late = microseconds(random.scaled(100, 20000));
  const bool receives_wait = random.chance(50);
  const bool two_tags =
      messages && random.chance(30); // the second one's messages are behind all others, and received first
  CallPlan call;
  call.waits = false;
  call.request.size = plan.size;
  call.request.dtype = DType::UInt8;
  call.request.segment_nbytes = plan.limits.window_nbytes / 4;
  call.request.numel = random.scaled(0, plan.limits.eager_nbytes);
  std::vector<CallPlan> received;
  for (int i = 0; i < many; ++i) {
    call.key = 200 + i;
    if (!messages) {
      call.request.kind = Collective::Broadcast;
      call.request.root = ahead;
      for (int rank = 0; rank < plan.size; ++rank) {
        CallPlan part = call;
        part.request.rank = rank;
        part.think = i == 0 && rank == behind ? late : Nanos(0);
        part.waits = i + 1 == many || (rank != ahead && receives_wait);
        insertBefore(plan.ranks[static_cast<size_t>(rank)], before, std::move(part));
      }
      continue;
    }
    call.tag = two_tags && i >= many / 2 ? 9 : 8;
    CallPlan send = call;
    send.request.kind = Collective::Send;
    send.request.rank = ahead;
    send.peer = send.request.root = behind;
    insertBefore(plan.ranks[static_cast<size_t>(ahead)], before, std::move(send));
    CallPlan receive = call;
    receive.request.kind = Collective::Recv;
    receive.request.rank = behind;
    receive.peer = receive.request.root = ahead;
    receive.waits = receives_wait;
    received.push_back(std::move(receive));
  }
  if (two_tags) {
    std::rotate(received.begin(), received.begin() + many / 2, received.end());
  }
  for (CallPlan& receive : received) {
    receive.think = &receive == &received.front() ? late : Nanos(0);
    insertBefore(plan.ranks[static_cast<size_t>(behind)], before, std::move(receive));
  }
}

/// A message to oneself. Its receive is posted first, often so long before the send that it asks for it.
void drawMessageToOneself(Random& random, Plan& plan, int key) {
  const auto rank = static_cast<int>(random.below(plan.size));
  const auto before = static_cast<int>(random.below(static_cast<int64_t>(plan.program.size()) + 1));
  CallPlan call;
  call.key = key;
  call.tag = static_cast<uint32_t>(key);
  call.peer = rank;
  call.waits = false;
  call.request.rank = call.request.root = rank;
  call.request.size = plan.size;
  call.request.dtype = DType::UInt8;
  call.request.segment_nbytes = plan.limits.window_nbytes / 4;
  call.request.numel = random.scaled(0, plan.limits.window_nbytes);
  CallPlan receive = call;
  receive.request.kind = Collective::Recv;
  insertBefore(plan.ranks[static_cast<size_t>(rank)], before, std::move(receive));
  call.request.kind = Collective::Send;
  call.think = microseconds(random.scaled(100, 20000));
  insertBefore(plan.ranks[static_cast<size_t>(rank)], before, std::move(call));
}

void encode(Random& random, Plan& plan, int key) {
  // Sums of integers up to 30: exact in fp16, and in bf16 up to 256.
  const Codec codec = plan.size <= 8 && random.chance(50) ? Codec::BFloat16 : Codec::Float16;
  const auto change = [&](CallPlan& call) {
    ScheduleRequest request = call.request;
    request.codec = codec;
    request.algorithm = Algorithm::Auto;
    static_cast<void>(makeSchedule(request)); // throws if the two do not fit together: a mistake in this file
    call.request = request;
  };
  for (RankPlan& rank : plan.ranks) {
    for (CallPlan& call : rank.calls) {
      if (call.key == key) {
        change(call);
      }
    }
  }
  change(plan.program[static_cast<size_t>(key)]);
}

bool takesCodec(const ScheduleRequest& request) {
  return (request.kind == Collective::AllReduce || request.kind == Collective::ReduceScatter) &&
      request.dtype == DType::Float32 && request.reduce_op == ReduceOp::Sum;
}

} // namespace

void drawExtras(Random& random, Plan& plan) {
  if (has(plan, FaultKind::Mismatch)) {
    return; // the call that differs, and the call that then waits, are drawn for the common program alone
  }
  if (plan.faults.empty() && random.chance(30)) {
    FaultPlan sleep;
    sleep.kind = FaultKind::Sleep;
    sleep.after_frames = random.scaled(1, 400);
    sleep.duration = milliseconds(random.within(100, 15000)); // deadlines are 20 s away
    plan.faults.push_back(sleep);
  }
  // Limits are small here, unlike a codec's block: a window must have room for a frame.
  const bool fits = plan.limits.window_nbytes >= encodedNbytes(Codec::Float16, kCodecBlock);
  for (const CallPlan& call : std::vector<CallPlan>(plan.program)) {
    if (takesCodec(call.request) && random.chance(60) && fits) {
      encode(random, plan, call.key);
    }
  }
  const int64_t many = random.scaled(0, 6);
  for (int64_t i = 0; i < many; ++i) {
    drawMessages(random, plan, 100 + static_cast<int>(i));
  }
  if (random.chance(25)) {
    drawLead(random, plan);
  }
  if (random.chance(20)) {
    drawMessageToOneself(random, plan, 700);
  }
}

} // namespace pycomm::sim
