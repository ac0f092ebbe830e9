#include "proof/sim/oracle.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "engine/operation/issue_context.h"
#include "schedule/make_schedule.h"

namespace pycomm::sim {
namespace {

template <typename Body>
void withType(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::Float32:
      return body(float{});
    case DType::Float64:
      return body(double{});
    case DType::Int64:
      return body(int64_t{});
    case DType::Int32:
      return body(int32_t{});
    case DType::UInt8:
    case DType::Int8:
    case DType::UInt16:
    case DType::Int16:
    case DType::UInt32:
    case DType::UInt64:
    case DType::Bool:
    case DType::Float16:
    case DType::BFloat16:
    case DType::Complex64:
    case DType::Complex128:
    case DType::Float8E4M3:
    case DType::Float8E5M2:
      return body(uint8_t{});
  }
}

template <typename T>
T valueAt(int key, int rank, int64_t place) {
  const uint64_t mixed =
      mix64(static_cast<uint64_t>(key + 1) << 48 ^ static_cast<uint64_t>(rank) << 40 ^ static_cast<uint64_t>(place));
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(static_cast<int64_t>(mixed % 61) - 30);
  } else {
    return static_cast<T>(mixed >> 3);
  }
}

template <typename T>
T combine(ReduceOp op, T a, T b) {
  if (op == ReduceOp::Max) {
    return std::max(a, b);
  }
  if (op == ReduceOp::Min) {
    return std::min(a, b);
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::Bxor) {
      return static_cast<T>(a ^ b);
    }
    if (op == ReduceOp::Band) {
      return static_cast<T>(a & b);
    }
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); // wraps
  } else {
    return a + b;
  }
}

template <typename T>
T reduced(const CallPlan& call, int64_t place) {
  const ScheduleRequest& request = call.request;
  T sum = valueAt<T>(call.key, 0, place);
  for (int rank = 1; rank < request.size; ++rank) {
    sum = combine(request.reduce_op, sum, valueAt<T>(call.key, rank, place));
  }
  return request.reduce_op == ReduceOp::Avg ? static_cast<T>(sum / static_cast<T>(request.size)) : sum;
}

int64_t countOf(const ScheduleRequest& request, int rank) {
  return request.counts.empty() ? request.numel : request.counts[static_cast<size_t>(rank)];
}

int64_t offsetOf(const ScheduleRequest& request, int rank) {
  int64_t offset = 0;
  for (int before = 0; before < rank; ++before) {
    offset += countOf(request, before);
  }
  return offset;
}

template <typename T>
std::vector<T> expected(const CallPlan& call) {
  const ScheduleRequest& request = call.request;
  const int me = request.rank;
  std::vector<T> out;
  const auto take = [&](int from, int64_t offset, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      out.push_back(valueAt<T>(call.key, from, offset + i));
    }
  };
  switch (request.kind) {
    case Collective::AllReduce:
    case Collective::Reduce:
      for (int64_t i = 0; i < request.numel && (request.kind == Collective::AllReduce || me == request.root); ++i) {
        out.push_back(reduced<T>(call, i));
      }
      break;
    case Collective::Broadcast:
      take(request.root, 0, request.numel);
      break;
    case Collective::AllGather:
    case Collective::Gather:
      for (int from = 0; from < request.size && (request.kind == Collective::AllGather || me == request.root); ++from) {
        take(from, 0, countOf(request, from));
      }
      break;
    case Collective::ReduceScatter:
      for (int64_t i = 0; i < countOf(request, me); ++i) {
        out.push_back(reduced<T>(call, offsetOf(request, me) + i));
      }
      break;
    case Collective::Scatter:
      take(request.root, offsetOf(request, me), countOf(request, me));
      break;
    case Collective::AllToAll:
      for (int from = 0; from < request.size; ++from) {
        ScheduleRequest theirs = request;
        if (!request.counts.empty()) {
          theirs.counts = allToAllCounts(call.key, from, request.size, false);
        }
        take(from, offsetOf(theirs, me), countOf(theirs, me));
      }
      break;
    case Collective::Recv: // of the root
      take(request.root, 0, request.numel);
      break;
    case Collective::Barrier:
    case Collective::Send:
      break;
  }
  return out;
}

template <typename T>
std::vector<std::byte> bytesOf(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  return bytes;
}

} // namespace

std::vector<std::byte> inputOf(const CallPlan& call, int rank) {
  std::vector<std::byte> bytes;
  ScheduleRequest request = call.request;
  request.rank = rank;
  withType(request.dtype, [&](auto zero) {
    using T = decltype(zero);
    std::vector<T> values;
    const int64_t numel = inputNumel(request);
    for (int64_t i = 0; i < numel; ++i) {
      values.push_back(valueAt<T>(call.key, rank, i));
    }
    bytes = bytesOf(values);
  });
  return bytes;
}

std::vector<std::byte> expectedOutput(const CallPlan& call) {
  std::vector<std::byte> bytes;
  withType(call.request.dtype, [&](auto zero) { bytes = bytesOf(expected<decltype(zero)>(call)); });
  return bytes;
}

} // namespace pycomm::sim
