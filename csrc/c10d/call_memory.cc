#include "c10d/call_memory.h"

#include <algorithm>
#include <set>
#include <string>
#include <tuple>

#include "base/error.h"
#include "c10d/call_tag.h"

namespace pycomm {
namespace {

/// The furthest end of the extents so far, and the furthest of those that belong to another call than that one.
class Furthest {
 public:
  void add(uintptr_t end, size_t call) {
    if (call == first_.call && first_.end != 0) {
      first_.end = std::max(first_.end, end);
    } else if (end > first_.end) {
      second_ = first_;
      first_ = {end, call};
    } else if (end > second_.end) {
      second_ = {end, call};
    }
  }
  [[nodiscard]] uintptr_t ofOthers(size_t call) const {
    return call == first_.call ? second_.end : first_.end;
  }

 private:
  struct End {
    uintptr_t end = 0;
    size_t call = 0;
  };
  End first_;
  End second_;
};

} // namespace

CallMemory CallMemory::with(const std::vector<Call>& calls, const char* op) const {
  std::vector<Extent> all = extents_;
  size_t index = count_;
  const auto add = [&](const std::byte* ptr, size_t nbytes, bool written) {
    if (nbytes > 0) {
      const auto begin = reinterpret_cast<uintptr_t>(ptr);
      all.push_back({begin, begin + nbytes, written, index});
    }
  };
  for (const Call& call : calls) {
    if (call.schedule.kind == Collective::Send || call.schedule.kind == Collective::Recv) {
      continue;
    }
    add(call.input.ptr, call.input.nbytes, false);
    add(call.output.ptr, call.output.nbytes, true);
    for (const ConstBufferView& part : call.input_parts) {
      add(part.ptr, part.nbytes, false);
    }
    for (const BufferView& part : call.output_parts) {
      add(part.ptr, part.nbytes, true);
    }
    ++index;
  }
  std::sort(all.begin(), all.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  Furthest written;
  Furthest any;
  for (const Extent& extent : all) {
    const Furthest& before = extent.written ? any : written;
    if (before.ofOthers(extent.call) > extent.begin) {
      throw Error(
          ErrorCode::InvalidArgument,
          std::string(op) +
              ": two calls of one list, or of one coalescing window, share memory that one of them writes, "
              "so the result would depend on the order in which bytes arrive.",
          "pass a tensor of its own for each");
    }
    any.add(extent.end, extent.call);
    if (extent.written) {
      written.add(extent.end, extent.call);
    }
  }
  CallMemory both;
  both.extents_ = std::move(all);
  both.count_ = index;
  return both;
}

void dropTwins(std::vector<Call>& calls) {
  std::set<std::tuple<const void*, size_t, const void*, DType, ReduceOp, double>> seen;
  std::string dropped;
  size_t index = 0;
  const auto isTwin = [&](const Call& call) {
    return call.schedule.kind == Collective::AllReduce &&
        !seen.emplace(
                 call.output.ptr,
                 call.output.nbytes,
                 call.input.ptr,
                 call.schedule.dtype,
                 call.schedule.reduce_op,
                 call.premul_factor)
             .second;
  };
  const auto last = std::remove_if(calls.begin(), calls.end(), [&](const Call& call) {
    const bool twin = isTwin(call);
    dropped += twin ? std::to_string(index) + ' ' : "";
    ++index;
    return twin;
  });
  calls.erase(last, calls.end());
  for (Call& call : calls) {
    call.tag = dropped.empty() ? call.tag : CallTag::of(dropped, call.tag);
  }
}

} // namespace pycomm
