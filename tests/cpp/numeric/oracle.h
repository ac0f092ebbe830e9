#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/reduce_op.h"

// What csrc/numeric must compute, by other means: tables of values made with ldexp, searched for the nearest; sums in
// the next wider type; __int128. Shares no line with the code under test.

namespace pycomm::oracle {

/// A format of up to 16 bits, as the list of its values.
class Format {
 public:
  Format(int exp_bits, int man_bits, bool has_infinity, uint32_t nan) : nan_(nan), has_infinity_(has_infinity) {
    const int bias = (1 << (exp_bits - 1)) - 1;
    const uint32_t top = has_infinity ? ((1U << exp_bits) - 1U) << man_bits : nan;
    for (uint32_t code = 0; code <= top; ++code) { // the last is where the next number would be: rounding goes there
      const int exponent = static_cast<int>(code >> man_bits);
      const double mantissa = code & ((1U << man_bits) - 1U);
      const double unit = std::ldexp(1.0, -man_bits);
      values_.push_back(
          exponent == 0 ? std::ldexp(mantissa * unit, 1 - bias) : std::ldexp(1.0 + mantissa * unit, exponent - bias));
    }
    sign_ = 1U << (exp_bits + man_bits);
  }

  [[nodiscard]] uint32_t top() const { // infinity, or NaN where there is none
    return static_cast<uint32_t>(values_.size() - 1);
  }
  [[nodiscard]] uint32_t sign() const {
    return sign_;
  }
  [[nodiscard]] uint32_t nan() const {
    return nan_;
  }
  /// Of a finite magnitude code, or of top(): the power of two just out of reach.
  [[nodiscard]] double magnitude(uint32_t code) const {
    return values_.at(code);
  }

  [[nodiscard]] double decode(uint32_t bits) const {
    const uint32_t code = bits & (sign_ - 1U);
    double value = std::numeric_limits<double>::quiet_NaN();
    if (code < top()) {
      value = values_[code];
    } else if (code == top() && has_infinity_) {
      value = std::numeric_limits<double>::infinity();
    }
    return (bits & sign_) != 0 ? -value : value;
  }

  [[nodiscard]] uint32_t encode(double value) const {
    if (std::isnan(value)) {
      return nan_;
    }
    const double size = std::fabs(value);
    const auto above = std::lower_bound(values_.begin(), values_.end(), size); // first that is not less
    uint32_t code = static_cast<uint32_t>(above - values_.begin());
    if (above == values_.end()) {
      code = top();
    } else if (*above != size) {
      const double down = size - values_[code - 1];
      const double up = values_[code] - size;
      if (down < up || (down == up && code % 2 == 1)) {
        --code;
      }
    }
    if (code == top() && !has_infinity_) {
      return nan_;
    }
    return std::signbit(value) ? code | sign_ : code;
  }

 private:
  std::vector<double> values_;
  uint32_t sign_ = 0;
  uint32_t nan_ = 0;
  bool has_infinity_ = true;
};

inline const Format& formatOf(DType dtype) {
  static const Format half(5, 10, true, 0x7e00);
  static const Format bfloat16(8, 7, true, 0x7fc0);
  static const Format e4m3(4, 3, false, 0x7f);
  static const Format e5m2(5, 2, true, 0x7f);
  if (dtype == DType::Float16) {
    return half;
  }
  if (dtype == DType::BFloat16) {
    return bfloat16;
  }
  if (dtype == DType::Float8E4M3) {
    return e4m3;
  }
  if (dtype == DType::Float8E5M2) {
    return e5m2;
  }
  throw std::logic_error("not a small float");
}

template <class T>
T readAs(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void writeAs(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

/// One element of a small float or fp32, exactly.
inline float readFloat(DType dtype, const void* from) {
  if (dtype == DType::Float32) {
    return readAs<float>(from);
  }
  const uint32_t bits = elementSize(dtype) == 1 ? readAs<uint8_t>(from) : readAs<uint16_t>(from);
  return static_cast<float>(formatOf(dtype).decode(bits));
}

inline void writeFloat(DType dtype, void* to, float value) {
  if (dtype == DType::Float32) {
    return std::isnan(value) ? writeAs(to, uint32_t{0x7fc00000}) : writeAs(to, value);
  }
  const uint32_t bits = formatOf(dtype).encode(static_cast<double>(value));
  return elementSize(dtype) == 1 ? writeAs(to, static_cast<uint8_t>(bits)) : writeAs(to, static_cast<uint16_t>(bits));
}

inline void writeDouble(void* to, double value) {
  return std::isnan(value) ? writeAs(to, uint64_t{0x7ff8000000000000}) : writeAs(to, value);
}

// More than twice the bits and two: +, * and / there, rounded again, are rounded right (Figueroa 1995).
#if defined(__x86_64__)
using Quad = __float128;
#else
using Quad = long double;
#endif
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, float>, double, Quad>;

template <class T>
T add(T a, T b) {
  return static_cast<T>(static_cast<Wide<T>>(a) + static_cast<Wide<T>>(b));
}

template <class T>
T multiply(T a, T b) {
  return static_cast<T>(static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b));
}

template <class T>
T quotient(T a, T b) {
  return static_cast<T>(static_cast<Wide<T>>(a) / static_cast<Wide<T>>(b));
}

template <class T>
T lesser(T a, T b) {
  if (std::isnan(a) || std::isnan(b)) {
    return std::numeric_limits<T>::quiet_NaN();
  }
  if (a == b) {
    return std::signbit(a) ? a : b;
  }
  return a < b ? a : b;
}

template <class T>
T combineFloats(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
    case ReduceOp::PremulSum:
      return add(a, b);
    case ReduceOp::Product:
      return multiply(a, b);
    case ReduceOp::Min:
      return lesser(a, b);
    case ReduceOp::Max:
      return -lesser(-a, -b);
    case ReduceOp::None:
    case ReduceOp::Band:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
      break;
  }
  throw std::logic_error("no such operation on floats");
}

template <class T>
T combineIntegers(ReduceOp op, T a, T b) {
  const __int128 x = a;
  const __int128 y = b;
  switch (op) {
    case ReduceOp::Sum:
      return static_cast<T>(x + y);
    case ReduceOp::Product: // unsigned: two uint64 may overflow even this
      return static_cast<T>(static_cast<unsigned __int128>(x) * static_cast<unsigned __int128>(y));
    case ReduceOp::Min:
      return static_cast<T>(x < y ? x : y);
    case ReduceOp::Max:
      return static_cast<T>(x > y ? x : y);
    case ReduceOp::Band:
      return static_cast<T>(x & y);
    case ReduceOp::Bor:
      return static_cast<T>(x | y);
    case ReduceOp::Bxor:
      return static_cast<T>(x ^ y);
    case ReduceOp::None:
    case ReduceOp::Avg:
    case ReduceOp::PremulSum:
      break;
  }
  throw std::logic_error("no such operation on integers");
}

inline bool combineBools(ReduceOp op, bool a, bool b) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Max:
    case ReduceOp::Bor:
      return a || b;
    case ReduceOp::Product:
    case ReduceOp::Min:
    case ReduceOp::Band:
      return a && b;
    case ReduceOp::Bxor:
      return a != b;
    case ReduceOp::None:
    case ReduceOp::Avg:
    case ReduceOp::PremulSum:
      break;
  }
  throw std::logic_error("no such operation on bools");
}

} // namespace pycomm::oracle
