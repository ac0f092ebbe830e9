// The steps that encode and decode.
#include <cstring>
#include <string>
#include <vector>

#include "base/fault_point.h"
#include "base/log.h"
#include "engine/data/local_steps.h"
#include "numeric/codec.h"

namespace pycomm {

void countOverflows(const Operation& operation, Codec codec, size_t overflows) {
  if (overflows == 0) {
    return;
  }
  auto& counted = operation.request().extras().codec_counters->overflows;
  if (counted.fetch_add(static_cast<int64_t>(overflows), std::memory_order_relaxed) == 0) { // one line per group
    log(LogLevel::Warn,
        operation.label() + ": " + std::to_string(overflows) + " finite values became infinite as " + codecName(codec) +
            ", being beyond or next to the largest float32; codec_stats() counts them.");
  }
}

void LocalSteps::countSent(const Step& step) const {
  const Codec codec = prepared_.schedule.codec;
  if (codec == Codec::None || prepared_.dtypeOf(step.src.buffer) != DType::UInt8) {
    return;
  }
  CodecCounters& counters = *operation_.request().extras().codec_counters;
  const int64_t numel = encodedNumel(codec, step.src.numel);
  const int64_t plain_nbytes = numel * static_cast<int64_t>(elementSize(prepared_.schedule.dtype));
  counters.sent_numel.fetch_add(numel, std::memory_order_relaxed);
  counters.sent_nbytes.fetch_add(step.src.numel, std::memory_order_relaxed);
  counters.saved_nbytes.fetch_add(plain_nbytes - step.src.numel, std::memory_order_relaxed);
}

void LocalSteps::runCodec(const Step& step, Slice slice) const {
  const Codec codec = prepared_.schedule.codec;
  const DType to = prepared_.dtypeOf(step.dst.buffer);
  const Operation::Request& request = operation_.request();
  const int64_t part = request.descriptor.numel;
  if (step.kind == StepKind::Encode && request.extras().input_encoded && step.src.buffer == Buffer::Input) {
    const std::byte* const encoded = request.input.ptr + prepared_.encodedOffset(step.src.offset, part);
    std::memcpy(at(step.dst), encoded, static_cast<size_t>(step.dst.numel));
    return;
  }
  if (step.kind == StepKind::Decode && request.extras().output_encoded && step.dst.buffer == Buffer::Output) {
    std::byte* const encoded = request.output.ptr + prepared_.encodedOffset(step.dst.offset, part);
    std::memcpy(encoded, at(step.src), static_cast<size_t>(step.src.numel));
    return;
  }
  auto* residual = reinterpret_cast<float*>(operation_.request().extras().residual.ptr);
  if (step.kind == StepKind::Encode) {
    const DType from = prepared_.dtypeOf(step.src.buffer);
    if (residual != nullptr) {
      const auto numel = static_cast<size_t>(step.src.numel);
      const auto* values = reinterpret_cast<const float*>(at(step.src));
      countOverflows(
          operation_, codec, encodeWithFeedback(codec, at(step.dst), values, residual + step.src.offset, numel));
      return;
    }
    countOverflows(
        operation_, codec, encode(codec, at(step.dst), from, at(step.src), static_cast<size_t>(step.src.numel)));
    return;
  }
  if (step.kind == StepKind::Decode) {
    decode(codec, to, at(step.dst), at(step.src), static_cast<size_t>(step.dst.numel));
    return;
  }
  PYCOMM_FAULT_POINT("reduce.step");
  std::vector<const void*> sources;
  for (uint32_t i = step.sources_begin; i < step.sources_end; ++i) {
    sources.push_back(at(cut(prepared_.schedule.sources[i], slice)));
  }
  const int64_t divisor = operation_.request().descriptor.reduce_op == ReduceOp::Avg ? size_ : 1;
  if (to != DType::UInt8) {
    const auto numel = static_cast<size_t>(step.dst.numel);
    countOverflows(
        operation_, codec, sumDecoded(codec, to, at(step.dst), sources.data(), sources.size(), numel, divisor));
    return;
  }
  const auto numel = static_cast<size_t>(encodedNumel(codec, step.dst.numel));
  if (residual != nullptr) { // after the Encode of this rank's own contribution, which it depends on
    float* error = residual + step.src.offset;
    countOverflows(
        operation_, codec, sumEncodedWithError(codec, at(step.dst), sources.data(), sources.size(), error, numel));
    return;
  }
  countOverflows(operation_, codec, sumEncoded(codec, at(step.dst), sources.data(), sources.size(), numel, divisor));
}

} // namespace pycomm
