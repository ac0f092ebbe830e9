#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "proof/schedule/interpreter.h"
#include "sanitized.h"
#include "schedule/make_schedule.h"

namespace pycomm::testing {

/// The same request on every rank.
inline std::vector<ScheduleRequest> forAllRanks(ScheduleRequest request) {
  std::vector<ScheduleRequest> requests;
  for (int32_t rank = 0; rank < request.size; ++rank) {
    request.rank = rank;
    requests.push_back(request);
  }
  return requests;
}

inline std::vector<Schedule> schedulesOf(const std::vector<ScheduleRequest>& requests) {
  std::vector<Schedule> schedules;
  for (const auto& request : requests) {
    schedules.push_back(makeSchedule(request));
  }
  return schedules;
}

template <typename T>
std::vector<std::byte> toBytes(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  if (!values.empty()) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  return bytes;
}

template <typename T>
std::vector<T> fromBytes(const std::vector<std::byte>& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
  }
  return values;
}

/// How a group is run.
struct RunOptions {
  ReduceOp op = ReduceOp::None;
  bool in_place = false;
  size_t window_frames = 1;
  std::vector<double> premul_factors;
};

/// Interprets all ranks' requests with these inputs and returns the outputs. Outputs begin as 0x5a bytes.
template <typename T>
std::vector<std::vector<T>> runGroup(
    const std::vector<ScheduleRequest>& requests,
    const std::vector<std::vector<T>>& inputs,
    const RunOptions& options) {
  std::vector<RankMemory> memory(requests.size());
  for (size_t rank = 0; rank < requests.size(); ++rank) {
    memory[rank].input = toBytes(inputs[rank]);
    memory[rank].output.assign(static_cast<size_t>(outputNumel(requests[rank])) * sizeof(T), std::byte{0x5a});
  }
  interpret(schedulesOf(requests), options.op, memory, options.in_place, options.window_frames, options.premul_factors);
  std::vector<std::vector<T>> outputs;
  for (const auto& rank_memory : memory) {
    outputs.push_back(fromBytes<T>(rank_memory.output));
  }
  return outputs;
}

/// Inputs that differ in every element of every rank, so that a wrong, missing or doubled operand shows in a sum.
inline std::vector<std::vector<int64_t>> distinctInputs(const std::vector<ScheduleRequest>& requests) {
  std::mt19937_64 random(20240229);
  std::vector<std::vector<int64_t>> inputs;
  for (const auto& request : requests) {
    std::vector<int64_t> values(static_cast<size_t>(inputNumel(request)));
    for (auto& value : values) {
      value = static_cast<int64_t>(random() >> 8); // 64 of them add up without overflow
    }
    inputs.push_back(values);
  }
  return inputs;
}

/// Group sizes up to 64: the small ones, and the larger ones at and beside powers of two. In full, all of them.
inline bool isTried(int32_t size) {
  return kInFull || size <= 13 || (size >= 15 && size <= 17) || (size >= 31 && size <= 33) || size == 64;
}
inline std::vector<int32_t> allSizes() {
  std::vector<int32_t> sizes;
  for (int32_t size = 1; size <= 64; ++size) {
    if (isTried(size)) {
      sizes.push_back(size);
    }
  }
  return sizes;
}
/// The element counts at which a split into `size` parts changes its shape: at every size at least none, one, one too few
/// for all parts, and one that does not divide. The larger groups take most of the time, so only some get the others.
inline std::vector<int64_t> interestingNumels(int32_t size) {
  std::vector<int64_t> numels{0, 1, size - 1, 2 * int64_t{size} + 3};
  if (size <= 13 || size == 16 || size == 32) {
    numels.insert(numels.end(), {2, size, size + 1, 127});
  }
  return numels;
}

inline std::string label(const ScheduleRequest& request, const RunOptions& options) {
  return std::string(collectiveName(request.kind)) + " " + algorithmName(request.algorithm) +
      " size=" + std::to_string(request.size) + " root=" + std::to_string(request.root) +
      " numel=" + std::to_string(request.numel) + " segment_nbytes=" + std::to_string(request.segment_nbytes) +
      " pipeline_frames=" + std::to_string(request.pipeline_frames) +
      " window=" + std::to_string(options.window_frames) + (options.in_place ? " in place" : "");
}

} // namespace pycomm::testing
