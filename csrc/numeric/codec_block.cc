#include "numeric/codec_block.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#include "numeric/small_float.h"

namespace pycomm::numeric {
namespace {

constexpr auto kBlock = static_cast<size_t>(kCodecBlock);
constexpr uint32_t kInfinity = 0x7f800000U;
constexpr uint32_t kLargestExponent = 254; // of finite fp32 numbers, biased

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

uint16_t readHeader(const std::byte* block) {
  uint16_t header = 0;
  std::memcpy(&header, block, sizeof header);
  return header;
}

} // namespace

void convertRow(const KernelSet& set, DType to, void* dst, DType from, const void* src, size_t numel, float factor) {
  auto kernel = set.convert(to, from);
  if (kernel == nullptr) {
    kernel = kScalarKernels.convert(to, from);
  }
  kernel(dst, src, numel, factor);
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
    case Codec::Int8:
      set.dequantize(dst, src + 2, numel, bitCast<float>(static_cast<uint32_t>(readHeader(src)) << 16));
      return;
  }
}

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

size_t encodeBlockKeeping(
    const KernelSet& set,
    Codec codec,
    std::byte* dst,
    const float* src,
    float* missing,
    size_t numel) {
  const size_t overflows = encodeBlock(set, codec, dst, src, numel);
  float back[kBlock];
  decodeBlock(set, codec, back, dst, numel);
  for (size_t i = 0; i < numel; ++i) {
    const float lacks = src[i] - back[i];
    missing[i] = std::isfinite(lacks) ? lacks : 0.0F;
  }
  return overflows;
}

} // namespace pycomm::numeric
