#pragma once

#include <cstddef>
#include <cstdint>

#include "base/codec.h"
#include "cuda/element.h"
#include "device/kernel_args.h"

// The work of one thread in the kernels of the wire codecs: the formats of numeric/codec.h, bit by bit. A block of kCodecBlock values is
// one warp's; in tests "threads" come one after the other.

namespace pycomm::cuda {

inline constexpr uint32_t kBlockValues = 256;
static_assert(kBlockValues == kCodecBlock, "the codecs' block");

/// The values and bytes of one block, among the blocks of all parts.
struct CodecBlock {
  uint64_t value = 0; ///< the first one
  uint64_t byte = 0;
  uint32_t count = 0; ///< of values
};

PYCOMM_HD uint64_t blocksOfPart(uint64_t numel) {
  return (numel + kBlockValues - 1) / kBlockValues;
}

PYCOMM_HD uint64_t codeNbytes(Codec codec) {
  return codec == Codec::Float16 || codec == Codec::BFloat16 ? 2 : 1;
}

PYCOMM_HD uint64_t headerNbytes(Codec codec) {
  return codec == Codec::BFloat16 ? 0 : 2;
}

PYCOMM_HD CodecBlock blockAt(const CodecArgs& args, uint64_t block) {
  const uint64_t blocks = blocksOfPart(args.numel);
  const uint64_t part = block / blocks;
  const uint64_t first = (block % blocks) * kBlockValues;
  const uint64_t header = headerNbytes(args.codec);
  const uint64_t code = codeNbytes(args.codec);
  CodecBlock at;
  at.value = part * args.numel + first;
  at.byte = part * (blocks * header + args.numel * code) + block % blocks * header + first * code;
  at.count = static_cast<uint32_t>(args.numel - first < kBlockValues ? args.numel - first : kBlockValues);
  return at;
}

/// What an encoder needs to know about a block. Those of several threads' shares combine by maximum.
struct BlockSummary {
  uint32_t max_bits = 0; ///< of the largest finite magnitude
};

PYCOMM_HD BlockSummary summarizeShare(const float* values, uint32_t count, uint32_t lane, uint32_t lanes) {
  BlockSummary summary;
  for (uint32_t i = lane; i < count; i += lanes) {
    const uint32_t magnitude = magnitudeBits(values[i]);
    if (magnitude < kFloatInfinity && magnitude > summary.max_bits) {
      summary.max_bits = magnitude;
    }
  }
  return summary;
}

PYCOMM_HD uint32_t codecHeader(Codec codec, const BlockSummary& summary) {
  const uint32_t exponent = summary.max_bits >> 23;
  if (codec == Codec::Float16) {
    return exponent > 15 ? exponent - 14 : 1;
  }
  if (codec == Codec::Int8) {
    const uint32_t up = (floatBits(floatOf(summary.max_bits) / 126.0F) + 0xffffU) >> 16;
    return up == 0 ? 1 : up;
  }
  return 0;
}

PYCOMM_HD uint32_t encodeValue(Codec codec, uint32_t header, float value) {
  const float factor = floatOf((254U - (header & 0xffU)) << 23); // of fp16
  if (codec == Codec::BFloat16) {
    return Bfloat16::store(value);
  }
  if (codec == Codec::Float16) {
    return Half::store(value * factor);
  }
  const uint32_t magnitude = magnitudeBits(value);
  const bool negative = floatBits(value) >> 31 != 0;
  if (magnitude >= kFloatInfinity) {
    return magnitude > kFloatInfinity ? 0x80U : (negative ? 0x81U : 0x7fU); // -128, -127, 127
  }
  // Around 1.5 * 2^23 fp32 numbers have a step of 1: the sum rounds to nearest even and has the whole number in its low bits.
  return (floatBits(value / floatOf(header << 16) + 12582912.0F) - 0x4b400000U) & 0xffU;
}

PYCOMM_HD float decodeValue(Codec codec, uint32_t header, uint32_t code) {
  const float factor = floatOf((header & 0xffU) << 23); // of fp16
  if (codec == Codec::BFloat16) {
    return Float32::store(Bfloat16::load(static_cast<uint16_t>(code)));
  }
  if (codec == Codec::Float16) {
    return Float32::store(Half::load(static_cast<uint16_t>(code)) * factor);
  }
  const auto number = static_cast<int32_t>(static_cast<int8_t>(code));
  if (number == -128) {
    return floatOf(kFloatNan);
  }
  if (number == 127 || number == -127) {
    return floatOf(kFloatInfinity | (number < 0 ? 0x80000000U : 0U));
  }
  return static_cast<float>(number) * floatOf(header << 16);
}

/// By bytes, since blocks of odd parts begin anywhere; codes of fp16 and bf16 are at even places.
PYCOMM_HD uint32_t codeAt(Codec codec, const uint8_t* codes, uint32_t i) {
  return codeNbytes(codec) == 2 ? reinterpret_cast<const uint16_t*>(codes)[i] : codes[i];
}

/// `summary` of the whole block. Returns how many finite values became infinite.
PYCOMM_HD uint32_t encodeShare(
    Codec codec,
    uint8_t* block,
    const float* values,
    uint32_t count,
    const BlockSummary& summary,
    uint32_t lane,
    uint32_t lanes) {
  const uint32_t header = codecHeader(codec, summary);
  uint8_t* const codes = block + headerNbytes(codec);
  if (lane == 0 && codec != Codec::BFloat16) {
    block[0] = static_cast<uint8_t>(header);
    block[1] = static_cast<uint8_t>(header >> 8);
  }
  uint32_t overflows = 0;
  for (uint32_t i = lane; i < count; i += lanes) {
    const float value = values[i];
    const uint32_t code = encodeValue(codec, header, value);
    if (codeNbytes(codec) == 2) {
      reinterpret_cast<uint16_t*>(codes)[i] = static_cast<uint16_t>(code);
    } else {
      codes[i] = static_cast<uint8_t>(code);
    }
    if (magnitudeBits(value) < kFloatInfinity && magnitudeBits(decodeValue(codec, header, code)) >= kFloatInfinity) {
      ++overflows;
    }
  }
  return overflows;
}

PYCOMM_HD void decodeShare(
    Codec codec,
    float* values,
    const uint8_t* block,
    uint32_t count,
    uint32_t lane,
    uint32_t lanes) {
  const uint32_t header = codec == Codec::BFloat16 ? 0U : block[0] | static_cast<uint32_t>(block[1]) << 8;
  const uint8_t* const codes = block + headerNbytes(codec);
  for (uint32_t i = lane; i < count; i += lanes) {
    values[i] = decodeValue(codec, header, codeAt(codec, codes, i));
  }
}

} // namespace pycomm::cuda
