#include "numeric/codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/error.h"
#include "numeric/codec_block.h"
#include "numeric/fp_environment.h"
#include "numeric/kernels.h"
#include "numeric/small_float.h"

namespace pycomm {
namespace {

using numeric::convertRow;
using numeric::decodeBlock;
using numeric::encodeBlock;
using numeric::encodeBlockKeeping;
using numeric::KernelSet;

constexpr auto kBlock = static_cast<size_t>(kCodecBlock);

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::Unsupported, what, "codecs encode float32, float64, float16 and bfloat16");
}

/// `numel` values as fp32: in place if they are fp32 already, or in `room`. Doubles beyond fp32 become infinite and are
/// counted.
const float* asFloats(
    const KernelSet& set,
    DType from,
    const std::byte* src,
    size_t numel,
    float* room,
    size_t& overflows) {
  if (from == DType::Float64) {
    for (size_t i = 0; i < numel; ++i) {
      double value = 0;
      std::memcpy(&value, src + i * sizeof value, sizeof value);
      room[i] = static_cast<float>(value);
      overflows += std::isfinite(value) && !std::isfinite(room[i]) ? 1U : 0U;
    }
  } else if (from == DType::Float32) {
    std::memcpy(room, src, numel * sizeof(float)); // `src` may have any alignment
  } else {
    convertRow(set, DType::Float32, room, from, src, numel, 1.0F);
  }
  return room;
}

void storeFloats(const KernelSet& set, DType to, std::byte* dst, const float* src, size_t numel) {
  if (to == DType::Float64) {
    for (size_t i = 0; i < numel; ++i) {
      const double value = numeric::canonical(static_cast<double>(src[i]));
      std::memcpy(dst + i * sizeof value, &value, sizeof value);
    }
  } else if (to == DType::Float32) {
    std::memcpy(dst, src, numel * sizeof(float));
  } else {
    convertRow(set, to, dst, DType::Float32, src, numel, 1.0F);
  }
}

void checkCodec(Codec codec) {
  if (codec == Codec::None || !isKnown(codec)) {
    refuse("there is nothing to encode with");
  }
}

void checkDType(DType dtype) {
  if (!isFloatingPoint(dtype) || elementSize(dtype) < 2) {
    refuse(std::string(dtypeName(dtype)) + " values cannot be encoded");
  }
}

/// Calls `body(first value, values)` for each block.
template <typename Body>
void forBlocks(size_t numel, const Body& body) {
  for (size_t at = 0; at < numel; at += kBlock) {
    body(at, std::min(kBlock, numel - at));
  }
}

size_t bytesBefore(Codec codec, size_t at) {
  return static_cast<size_t>(encodedNbytes(codec, static_cast<int64_t>(at)));
}

/// The number of sums that are not finite although all their operands are. Only blocks with such a sum pay for the
/// search.
size_t countOverflownSums(
    const KernelSet& set,
    Codec codec,
    const float* sum,
    const void* const* sources,
    size_t source_count,
    size_t offset,
    size_t count) {
  if (source_count == 1 || !set.summarize(sum, count).special) {
    return 0;
  }
  bool overflown[kBlock];
  for (size_t i = 0; i < count; ++i) {
    overflown[i] = !std::isfinite(sum[i]);
  }
  float row[kBlock];
  for (size_t k = 0; k < source_count; ++k) {
    decodeBlock(set, codec, row, static_cast<const std::byte*>(sources[k]) + offset, count);
    for (size_t i = 0; i < count; ++i) {
      overflown[i] = overflown[i] && std::isfinite(row[i]);
    }
  }
  return static_cast<size_t>(std::count(overflown, overflown + count, true));
}

/// The sum of one block of all sources, in `sum`. Returns how many finite values became an infinite sum.
size_t sumBlock(
    const KernelSet& set,
    Codec codec,
    float* sum,
    const void* const* sources,
    size_t source_count,
    size_t at,
    size_t count,
    int64_t divisor) {
  float next[kBlock];
  const size_t offset = bytesBefore(codec, at);
  for (size_t k = 0; k < source_count; ++k) {
    decodeBlock(set, codec, k == 0 ? sum : next, static_cast<const std::byte*>(sources[k]) + offset, count);
    if (k > 0) {
      set.reduce(DType::Float32, ReduceOp::Sum)(sum, sum, next, count);
    }
  }
  const size_t overflows = countOverflownSums(set, codec, sum, sources, source_count, offset, count);
  if (divisor != 1) {
    set.divide(DType::Float32)(sum, sum, count, static_cast<double>(divisor));
  }
  return overflows;
}

void checkSum(Codec codec, size_t source_count, int64_t divisor) {
  checkCodec(codec);
  if (source_count == 0 || divisor < 1) {
    throw Error(ErrorCode::InvalidArgument, "a sum needs at least one source and a divisor of at least 1");
  }
}

} // namespace

size_t encode(Codec codec, void* dst, DType from, const void* src, size_t numel) {
  checkCodec(codec);
  checkDType(from);
  const KernelSet& set = numeric::activeKernels();
  const numeric::FpEnvironment environment;
  const size_t element_nbytes = elementSize(from);
  size_t overflows = 0;
  forBlocks(numel, [&](size_t at, size_t count) {
    float room[kBlock];
    const std::byte* block = static_cast<const std::byte*>(src) + at * element_nbytes;
    const float* values = asFloats(set, from, block, count, room, overflows);
    overflows += encodeBlock(set, codec, static_cast<std::byte*>(dst) + bytesBefore(codec, at), values, count);
  });
  return overflows;
}

size_t encodeWithError(Codec codec, void* dst, const float* src, float* error, size_t numel) {
  checkCodec(codec);
  const KernelSet& set = numeric::activeKernels();
  const numeric::FpEnvironment environment;
  size_t overflows = 0;
  forBlocks(numel, [&](size_t at, size_t count) {
    std::byte* block = static_cast<std::byte*>(dst) + bytesBefore(codec, at);
    overflows += encodeBlockKeeping(set, codec, block, src + at, error + at, count);
  });
  return overflows;
}

size_t encodeWithFeedback(Codec codec, void* dst, const float* src, float* error, size_t numel) {
  checkCodec(codec);
  const KernelSet& set = numeric::activeKernels();
  const numeric::ReduceKernel add = set.reduce(DType::Float32, ReduceOp::Sum);
  const numeric::FpEnvironment environment;
  size_t overflows = 0;
  forBlocks(numel, [&](size_t at, size_t count) {
    float values[kBlock];
    add(values, src + at, error + at, count);
    std::byte* block = static_cast<std::byte*>(dst) + bytesBefore(codec, at);
    overflows += encodeBlockKeeping(set, codec, block, values, error + at, count);
  });
  return overflows;
}

void decode(Codec codec, DType to, void* dst, const void* src, size_t numel) {
  const void* const sources[] = {src};
  static_cast<void>(sumDecoded(codec, to, dst, sources, 1, numel)); // one row cannot overflow
}

size_t sumEncoded(
    Codec codec,
    void* dst,
    const void* const* sources,
    size_t source_count,
    size_t numel,
    int64_t divisor) {
  checkSum(codec, source_count, divisor);
  const KernelSet& set = numeric::activeKernels();
  const numeric::FpEnvironment environment;
  size_t overflows = 0;
  forBlocks(numel, [&](size_t at, size_t count) {
    float sum[kBlock];
    overflows += sumBlock(set, codec, sum, sources, source_count, at, count, divisor);
    overflows += encodeBlock(set, codec, static_cast<std::byte*>(dst) + bytesBefore(codec, at), sum, count);
  });
  return overflows;
}

size_t sumEncodedWithError(
    Codec codec,
    void* dst,
    const void* const* sources,
    size_t source_count,
    float* error,
    size_t numel) {
  checkSum(codec, source_count, 1);
  const KernelSet& set = numeric::activeKernels();
  const numeric::FpEnvironment environment;
  size_t overflows = 0;
  forBlocks(numel, [&](size_t at, size_t count) {
    float sum[kBlock];
    std::byte* block = static_cast<std::byte*>(dst) + bytesBefore(codec, at);
    overflows += sumBlock(set, codec, sum, sources, source_count, at, count, 1);
    overflows += encodeBlockKeeping(set, codec, block, sum, sum, count);
    set.reduce(DType::Float32, ReduceOp::Sum)(error + at, error + at, sum, count);
  });
  return overflows;
}

size_t sumDecoded(
    Codec codec,
    DType to,
    void* dst,
    const void* const* sources,
    size_t source_count,
    size_t numel,
    int64_t divisor) {
  checkSum(codec, source_count, divisor);
  checkDType(to);
  const KernelSet& set = numeric::activeKernels();
  const numeric::FpEnvironment environment;
  const size_t element_nbytes = elementSize(to);
  size_t overflows = 0;
  forBlocks(numel, [&](size_t at, size_t count) {
    float sum[kBlock];
    overflows += sumBlock(set, codec, sum, sources, source_count, at, count, divisor);
    storeFloats(set, to, static_cast<std::byte*>(dst) + at * element_nbytes, sum, count);
  });
  return overflows;
}

} // namespace pycomm
