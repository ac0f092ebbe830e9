#include "numeric/codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/error.h"
#include "numeric/fp_environment.h"
#include "numeric/kernels.h"
#include "numeric/small_float.h"

namespace pycomm {
namespace {

using numeric::bitCast;
using numeric::BlockSummary;
using numeric::KernelSet;
using numeric::kScalarKernels;

constexpr auto kBlock = static_cast<size_t>(kCodecBlock);
constexpr uint32_t kInfinity = 0x7f800000U;
constexpr uint32_t kLargestExponent = 254; // of finite fp32 numbers, biased
constexpr uint16_t kSpecialFlag =
    0x100; // in the header of an fp8 block: kFloat8Infinity and kFloat8SpecialNan are in use

// e4m3fn has no infinity. In a block that needs one its NaNs become the infinities, and -0 becomes NaN.
constexpr uint8_t kFloat8Infinity = 0x7f;
constexpr uint8_t kFloat8MinusInfinity = 0xff;
constexpr uint8_t kFloat8SpecialNan = 0x80;

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::Unsupported, what, "codecs encode float32, float64, float16 and bfloat16");
}

void convertRow(const KernelSet& set, DType to, void* dst, DType from, const void* src, size_t numel, float factor) {
  auto kernel = set.convert(to, from);
  if (kernel == nullptr) {
    kernel = kScalarKernels.convert(to, from);
  }
  kernel(dst, src, numel, factor);
}

/// 2^(exponent - 127), for exponents of ordinary numbers.
float powerOfTwo(uint32_t exponent) {
  return bitCast<float>(exponent << 23);
}

/// The exponent b of a block whose largest number shall get the exponent `top` when multiplied by 2^(127 - b).
uint32_t blockExponent(const BlockSummary& summary, uint32_t top) {
  const uint32_t exponent = summary.max_bits >> 23;
  return exponent > top + 1 ? exponent - top : 1; // at most 254 - 7, so that 254 - b is one of an ordinary number
}

/// The scale of an int8 block as bf16: max / 126, rounded up, so that no code is larger than 126. At least bf16's smallest number.
uint16_t int8Scale(const BlockSummary& summary) {
  const float scale = bitCast<float>(summary.max_bits) / 126.0F;
  const uint32_t up = (bitCast<uint32_t>(scale) + 0xffffU) >> 16;
  return static_cast<uint16_t>(up == 0 ? 1 : up);
}

void markSpecials(std::byte* codes, const float* src, size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const uint32_t bits = bitCast<uint32_t>(src[i]);
    const uint32_t magnitude = bits & 0x7fffffffU;
    const auto code = std::to_integer<uint8_t>(codes[i]);
    if (magnitude < kInfinity) {
      codes[i] = code == kFloat8SpecialNan ? std::byte{0} : codes[i];
    } else {
      const uint8_t infinite = bits >> 31 != 0 ? kFloat8MinusInfinity : kFloat8Infinity;
      codes[i] = std::byte{magnitude == kInfinity ? infinite : kFloat8SpecialNan};
    }
  }
}

void restoreSpecials(float* dst, const std::byte* codes, size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const auto code = std::to_integer<uint8_t>(codes[i]);
    if (code == kFloat8SpecialNan) {
      dst[i] = bitCast<float>(numeric::kFloatNan);
    } else if (code == kFloat8Infinity || code == kFloat8MinusInfinity) {
      dst[i] = bitCast<float>(code == kFloat8Infinity ? kInfinity : kInfinity | 0x80000000U);
    }
  }
}

uint16_t readHeader(const std::byte* block) {
  uint16_t header = 0;
  std::memcpy(&header, block, sizeof header);
  return header;
}

void decodeBlock(const KernelSet& set, Codec codec, float* dst, const std::byte* src, size_t numel) {
  switch (codec) {
    case Codec::None:
      return;
    case Codec::BFloat16:
      convertRow(set, DType::Float32, dst, DType::BFloat16, src, numel, 1.0F);
      return;
    case Codec::Float16:
      convertRow(set, DType::Float32, dst, DType::Float16, src + 2, numel, powerOfTwo(readHeader(src) & 0xffU));
      return;
    case Codec::Float8:
      convertRow(set, DType::Float32, dst, DType::Float8E4M3, src + 2, numel, powerOfTwo(readHeader(src) & 0xffU));
      if ((readHeader(src) & kSpecialFlag) != 0) {
        restoreSpecials(dst, src + 2, numel);
      }
      return;
    case Codec::Int8:
      set.dequantize(dst, src + 2, numel, bitCast<float>(static_cast<uint32_t>(readHeader(src)) << 16));
      return;
  }
}

/// Returns how many finite values became infinite: only possible where the largest has the largest exponent.
size_t encodeBlock(const KernelSet& set, Codec codec, std::byte* dst, const float* src, size_t numel) {
  const BlockSummary summary = set.summarize(src, numel);
  uint16_t header = 0;
  switch (codec) {
    case Codec::None:
      return 0;
    case Codec::BFloat16:
      convertRow(set, DType::BFloat16, dst, DType::Float32, src, numel, 1.0F);
      break;
    case Codec::Float16:
      header = static_cast<uint16_t>(blockExponent(summary, 14));
      convertRow(set, DType::Float16, dst + 2, DType::Float32, src, numel, powerOfTwo(254U - header));
      break;
    case Codec::Float8:
      header = static_cast<uint16_t>(blockExponent(summary, 7));
      convertRow(set, DType::Float8E4M3, dst + 2, DType::Float32, src, numel, powerOfTwo(254U - header));
      if (summary.special) {
        header |= kSpecialFlag;
        markSpecials(dst + 2, src, numel);
      }
      break;
    case Codec::Int8:
      header = int8Scale(summary);
      set.quantize(dst + 2, src, numel, bitCast<float>(static_cast<uint32_t>(header) << 16));
      break;
  }
  if (codec != Codec::BFloat16) {
    std::memcpy(dst, &header, sizeof header);
  }
  if (summary.max_bits >> 23 < kLargestExponent) {
    return 0;
  }
  float back[kBlock];
  decodeBlock(set, codec, back, dst, numel);
  size_t overflows = 0;
  for (size_t i = 0; i < numel; ++i) {
    overflows += std::isfinite(src[i]) && !std::isfinite(back[i]) ? 1U : 0U;
  }
  return overflows;
}

/// `numel` values as fp32: where they are, or in `room`. Doubles beyond fp32 become infinite and are counted.
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

/// How many sums are not finite though all that was added is. Only blocks that have such a sum pay for looking.
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

/// encodeWithError() of the block that begins at `at`: of `values`, which are its own, but not of `dst` and `error`.
size_t encodeBlockWithError(
    const KernelSet& set,
    Codec codec,
    void* dst,
    const float* values,
    float* error,
    size_t at,
    size_t count) {
  std::byte* block = static_cast<std::byte*>(dst) + bytesBefore(codec, at);
  const size_t overflows = encodeBlock(set, codec, block, values, count);
  float back[kBlock];
  decodeBlock(set, codec, back, block, count);
  for (size_t i = 0; i < count; ++i) {
    const float missing = values[i] - back[i];
    error[at + i] = std::isfinite(missing) ? missing : 0.0F;
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
    overflows += encodeBlockWithError(set, codec, dst, src + at, error, at, count);
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
    overflows += encodeBlockWithError(set, codec, dst, values, error, at, count);
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
    float back[kBlock];
    std::byte* block = static_cast<std::byte*>(dst) + bytesBefore(codec, at);
    overflows += sumBlock(set, codec, sum, sources, source_count, at, count, 1);
    overflows += encodeBlock(set, codec, block, sum, count);
    decodeBlock(set, codec, back, block, count);
    for (size_t i = 0; i < count; ++i) {
      const float missing = sum[i] - back[i];
      error[at + i] += std::isfinite(missing) ? missing : 0.0F;
    }
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
