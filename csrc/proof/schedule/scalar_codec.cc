#include "proof/schedule/scalar_codec.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "base/error.h"

namespace pycomm {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

float toFloat(double value) {
  return static_cast<float>(value);
}

double readValue(DType dtype, const std::byte* src, size_t i) {
  if (dtype == DType::Float64) {
    double value = 0;
    std::memcpy(&value, src + i * sizeof value, sizeof value);
    return toFloat(value);
  }
  float value = 0;
  std::memcpy(&value, src + i * sizeof value, sizeof value);
  return value;
}

void writeValue(DType dtype, std::byte* dst, size_t i, double value) {
  if (dtype == DType::Float64) {
    std::memcpy(dst + i * sizeof value, &value, sizeof value);
    return;
  }
  const float narrow = std::isnan(value) ? std::numeric_limits<float>::quiet_NaN() : toFloat(value);
  std::memcpy(dst + i * sizeof narrow, &narrow, sizeof narrow);
}

/// A binary format with `bits` significant bits and ordinary numbers from 2^lowest on.
struct Format {
  int bits;
  int exponent_bits;
  int lowest;
};
constexpr Format kBfloat16 = {8, 8, -126};
constexpr Format kHalf = {11, 5, -14};

/// The code of a finite value that the format can hold (or rounds to twice its largest power): its index in the list of
/// the format's numbers.
uint32_t codeOf(const Format& format, double value) {
  const double magnitude = std::fabs(value);
  const int exponent = magnitude == 0 ? format.lowest : std::max(std::ilogb(magnitude), format.lowest);
  const double steps = std::nearbyint(std::ldexp(magnitude, format.bits - 1 - exponent));
  const double base = std::ldexp(static_cast<double>(exponent - format.lowest), format.bits - 1);
  const auto code = static_cast<uint32_t>(base + steps);
  return code | (std::signbit(value) ? 1U << (format.bits - 1 + format.exponent_bits) : 0U);
}

double valueOf(const Format& format, uint32_t code) {
  const uint32_t sign = 1U << (format.bits - 1 + format.exponent_bits);
  const uint32_t place = code & (sign - 1);
  const uint32_t per_power = 1U << (format.bits - 1);
  const int power = place < 2 * per_power ? 0 : static_cast<int>(place / per_power) - 1;
  const double steps = static_cast<double>(place) - static_cast<double>(power) * per_power;
  const double magnitude = std::ldexp(steps, format.lowest + power - (format.bits - 1));
  return (code & sign) != 0 ? -magnitude : magnitude;
}

uint32_t specialCode(const Format& format, double value) {
  const uint32_t infinity = ((1U << format.exponent_bits) - 1U) << (format.bits - 1);
  if (std::isnan(value)) {
    return infinity | 1U << (format.bits - 2);
  }
  return infinity | (value < 0 ? 1U << (format.bits - 1 + format.exponent_bits) : 0U);
}

void put16(std::byte* dst, uint32_t code) {
  const auto narrow = static_cast<uint16_t>(code);
  std::memcpy(dst, &narrow, sizeof narrow);
}

uint16_t get16(const std::byte* src) {
  uint16_t code = 0;
  std::memcpy(&code, src, sizeof code);
  return code;
}

double decode16(const Format& format, uint32_t code) {
  const uint32_t infinity = specialCode(format, kInfinity);
  const uint32_t magnitude = code & 0x7fffU;
  if (magnitude > infinity) {
    return kNan;
  }
  return magnitude == infinity ? ((code & 0x8000U) != 0 ? -kInfinity : kInfinity) : valueOf(format, code);
}

void encodeBlock(Codec codec, std::byte* dst, const std::vector<double>& values) {
  double largest = 0;
  for (const double value : values) {
    largest = std::isfinite(value) ? std::max(largest, std::fabs(value)) : largest;
  }
  if (codec == Codec::BFloat16) {
    for (size_t i = 0; i < values.size(); ++i) {
      put16(dst + 2 * i, std::isfinite(values[i]) ? codeOf(kBfloat16, values[i]) : specialCode(kBfloat16, values[i]));
    }
    return;
  }
  if (codec == Codec::Int8) {
    double scale = std::ldexp(1.0, -133);
    if (largest > 0) {
      const double exact = toFloat(toFloat(largest) / 126.0F);
      const double step = exact == 0 ? scale : std::max(scale, std::ldexp(1.0, std::ilogb(exact) - 7));
      scale = std::max(scale, std::ceil(exact / step) * step);
    }
    put16(dst, codeOf(kBfloat16, scale));
    for (size_t i = 0; i < values.size(); ++i) {
      const double value = values[i];
      const double infinite = value < 0 ? -127 : 127;
      const double code = std::nearbyint(toFloat(toFloat(value) / toFloat(scale)));
      const double chosen = std::isnan(value) ? -128 : (std::isinf(value) ? infinite : code);
      dst[2 + i] = static_cast<std::byte>(static_cast<int>(chosen));
    }
    return;
  }
  const int exponent = largest == 0 ? -200 : std::ilogb(largest);
  const int shift = std::max(exponent - 14, -126);
  put16(dst, static_cast<uint32_t>(shift + 127));
  for (size_t i = 0; i < values.size(); ++i) {
    const double value = values[i];
    const bool finite = std::isfinite(value);
    put16(dst + 2 + 2 * i, finite ? codeOf(kHalf, std::ldexp(value, -shift)) : specialCode(kHalf, value));
  }
}

double decodeOne(Codec codec, const std::byte* block, size_t i) {
  const auto code = std::to_integer<uint32_t>(block[codec == Codec::Int8 ? 2 + i : 0]);
  switch (codec) {
    case Codec::None:
      break;
    case Codec::BFloat16:
      return decode16(kBfloat16, get16(block + 2 * i));
    case Codec::Float16:
      return std::ldexp(decode16(kHalf, get16(block + 2 + 2 * i)), static_cast<int>(get16(block) & 0xffU) - 127);
    case Codec::Int8: {
      const int number = code < 128 ? static_cast<int>(code) : static_cast<int>(code) - 256;
      if (number == -128) {
        return kNan;
      }
      if (number == 127 || number == -127) {
        return number < 0 ? -kInfinity : kInfinity;
      }
      return number * decode16(kBfloat16, get16(block));
    }
  }
  throw Error(ErrorCode::Unsupported, "no such codec");
}

} // namespace

void encodeElements(Codec codec, std::byte* dst, DType dtype, const std::byte* src, size_t numel) {
  for (size_t begin = 0; begin < numel; begin += kCodecBlock) {
    std::vector<double> values;
    for (size_t i = begin; i < std::min<size_t>(numel, begin + kCodecBlock); ++i) {
      values.push_back(readValue(dtype, src, i));
    }
    encodeBlock(codec, dst + encodedNbytes(codec, static_cast<int64_t>(begin)), values);
  }
}

void decodeElements(Codec codec, DType dtype, std::byte* dst, const std::byte* src, size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const size_t begin = i / kCodecBlock * kCodecBlock;
    const double value = decodeOne(codec, src + encodedNbytes(codec, static_cast<int64_t>(begin)), i - begin);
    // Through fp32, as in the codec's product with a scale.
    writeValue(dtype, dst, i, std::isnan(value) ? kNan : static_cast<double>(toFloat(value)));
  }
}

} // namespace pycomm
