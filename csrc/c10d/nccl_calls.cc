#include "c10d/nccl_calls.h"

#include <string>
#include <utility>

#include "base/error.h"

namespace pycomm {
namespace {

using cuda::NcclCall;

} // namespace

void NcclCalls::add(const Group::Call& call, const Operation& operation) {
  const ScheduleRequest& schedule = call.schedule;
  NcclCall each;
  each.kind = schedule.kind;
  each.algorithm = schedule.algorithm;
  each.input = call.input.ptr;
  each.output = call.output.ptr;
  each.numel = static_cast<uint64_t>(schedule.numel);
  each.dtype = schedule.dtype;
  each.op = schedule.reduce_op;
  each.peer = schedule.root;
  each.name = operation.name();
  each.sequence = operation.request().id.sequence;
  const auto size = static_cast<size_t>(size_);
  const auto counts = [](const std::vector<int64_t>& given) { return Counts(given.begin(), given.end()); };
  switch (schedule.kind) {
    case Collective::AllReduce:
    case Collective::Reduce:
    case Collective::Broadcast:
      list_.push_back(std::move(each));
      return;
    case Collective::AllGather:
    case Collective::ReduceScatter:
      if (schedule.counts.empty()) {
        list_.push_back(std::move(each));
      } else {
        addParts(std::move(each), call);
      }
      return;
    case Collective::AllToAll:
      exchange(std::move(each), counts(schedule.counts), counts(schedule.recv_counts));
      return;
    case Collective::Gather:
    case Collective::Scatter: {
      Counts own(size, 0);
      own[static_cast<size_t>(schedule.root)] = static_cast<uint64_t>(schedule.counts[static_cast<size_t>(rank_)]);
      Counts all = rank_ == schedule.root ? counts(schedule.counts) : Counts(size, 0);
      if (schedule.kind == Collective::Gather) {
        exchange(std::move(each), std::move(own), std::move(all));
      } else {
        exchange(std::move(each), std::move(all), std::move(own));
      }
      return;
    }
    case Collective::Barrier:
    case Collective::Send:
    case Collective::Recv:
      break;
  }
  throw Error(ErrorCode::Internal, std::string(operation.name()) + " is none of those that NCCL runs.");
}

// A broadcast from each rank, or a reduce to each, of its part.
void NcclCalls::addParts(NcclCall each, const Group::Call& call) {
  const size_t element = elementSize(call.schedule.dtype);
  const bool gathers = call.schedule.kind == Collective::AllGather;
  each.kind = gathers ? Collective::Broadcast : Collective::Reduce;
  uint64_t begin = 0;
  for (int part = 0; part < size_; ++part) {
    const auto numel = static_cast<uint64_t>(call.schedule.counts[static_cast<size_t>(part)]);
    each.peer = part;
    each.numel = numel;
    if (gathers) {
      std::byte* const place = call.output.ptr + begin * element;
      each.input = part == rank_ ? call.input.ptr : place;
      each.output = place;
    } else {
      each.input = call.input.ptr + begin * element;
      each.output = part == rank_ ? call.output.ptr : nullptr;
    }
    if (numel > 0) {
      list_.push_back(each);
    }
    begin += numel;
  }
}

void NcclCalls::exchange(NcclCall each, Counts sent, Counts received) {
  each.send_counts = std::move(sent);
  each.recv_counts = std::move(received);
  each.kind = Collective::AllToAll;
  each.peer = 0;
  list_.push_back(std::move(each));
}

} // namespace pycomm
