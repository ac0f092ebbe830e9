#include "proof/schedule/scalar_math.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "base/error.h"

namespace pycomm {
namespace {

template <typename T>
T loadAs(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <typename T>
void storeAs(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

/// A dtype whose accumulation type is itself.
template <typename T>
struct Plain {
  using Stored = T;
  using Accumulated = T;
  static T load(const std::byte* at) {
    return loadAs<T>(at);
  }
  static void store(std::byte* at, T value) {
    storeAs(at, value);
  }
};

struct Half {
  using Stored = uint16_t;
  using Accumulated = float;

  static float load(const std::byte* at) {
    const auto bits = loadAs<uint16_t>(at);
    const int exponent = (bits >> 10) & 31;
    const int fraction = bits & 1023;
    float value = 0;
    if (exponent == 31) {
      value = fraction == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
    } else if (exponent == 0) {
      value = std::ldexp(static_cast<float>(fraction), -24);
    } else {
      value = std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
    }
    return (bits & 0x8000) != 0 ? -value : value;
  }

  static void store(std::byte* at, float value) {
    const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
    const float magnitude = std::fabs(value);
    uint16_t bits = 0;
    if (std::isnan(value)) {
      bits = 0x7e00;
    } else if (magnitude >= 65520.0F) { // halfway between the largest half and the next power of two
      bits = 0x7c00;
    } else if (magnitude < 0x1p-14F) {
      bits = static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 24))); // 1024 is the smallest normal's bits
    } else {
      int exponent = 0;
      const float fraction = std::frexp(magnitude, &exponent); // in [0.5, 1)
      const auto rounded = static_cast<int>(std::nearbyint(std::ldexp(fraction, 11))); // 1024 to 2048
      bits = static_cast<uint16_t>(((exponent + 14 - 1) << 10) + rounded); // 2048 carries into the exponent
    }
    storeAs(at, static_cast<uint16_t>(sign | bits));
  }
};

struct BHalf {
  using Stored = uint16_t;
  using Accumulated = float;

  static float load(const std::byte* at) {
    const uint32_t bits = static_cast<uint32_t>(loadAs<uint16_t>(at)) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  static void store(std::byte* at, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (std::isnan(value)) {
      storeAs<uint16_t>(at, static_cast<uint16_t>((bits >> 16) | 0x0040));
      return;
    }
    const uint32_t dropped = bits & 0xffff;
    uint32_t kept = bits >> 16;
    kept += dropped > 0x8000 || (dropped == 0x8000 && (kept & 1) != 0) ? 1 : 0;
    storeAs<uint16_t>(at, static_cast<uint16_t>(kept));
  }
};

template <typename F>
void withDType(DType dtype, F&& use) {
  if (dtype == DType::Float16) {
    use(Half());
  } else if (dtype == DType::BFloat16) {
    use(BHalf());
  } else if (dtype == DType::Float32) {
    use(Plain<float>());
  } else if (dtype == DType::Float64) {
    use(Plain<double>());
  } else if (dtype == DType::UInt8) {
    use(Plain<uint8_t>());
  } else if (dtype == DType::Int8) {
    use(Plain<int8_t>());
  } else if (dtype == DType::Int32) {
    use(Plain<int32_t>());
  } else if (dtype == DType::Int64) {
    use(Plain<int64_t>());
  } else {
    const std::string why = std::string("the interpreter does not compute with ") + dtypeName(dtype);
    throw Error(ErrorCode::Unsupported, why, "use another dtype");
  }
}

template <typename T>
T wrapping(ReduceOp op, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    // uint64_t, so that neither overflow nor promotion to int is undefined behaviour
    const auto x = static_cast<uint64_t>(a);
    const auto y = static_cast<uint64_t>(b);
    return static_cast<T>(op == ReduceOp::Product ? x * y : x + y);
  } else {
    return op == ReduceOp::Product ? a * b : a + b;
  }
}

template <typename T>
T extreme(ReduceOp op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) || std::isnan(b)) {
      return std::isnan(a) ? a : b;
    }
  }
  return (op == ReduceOp::Min ? b < a : a < b) ? b : a;
}

template <typename T>
T bitwise(ReduceOp op, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(op == ReduceOp::Band ? a & b : (op == ReduceOp::Bor ? a | b : a ^ b));
  } else {
    return a; // whyUnsupported() has refused it
  }
}

template <typename T>
T combine(ReduceOp op, T lower, T higher) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
    case ReduceOp::PremulSum:
    case ReduceOp::Product:
      return wrapping(op, lower, higher);
    case ReduceOp::Min:
    case ReduceOp::Max:
      return extreme(op, lower, higher);
    case ReduceOp::Band:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
      return bitwise(op, lower, higher);
    case ReduceOp::None:
      return lower;
  }
  return lower;
}

} // namespace

void foldElements(
    DType dtype,
    ReduceOp op,
    std::byte* dst,
    const std::vector<const std::byte*>& sources,
    size_t numel,
    int64_t divisor) {
  const std::string why =
      op == ReduceOp::None ? "a step reduces, but no reduce op is given" : whyUnsupported(op, dtype);
  if (!why.empty()) {
    throw Error(ErrorCode::Unsupported, why, "use another reduce op or dtype");
  }
  withDType(dtype, [&](auto traits) {
    using Traits = decltype(traits);
    using Accumulated = typename Traits::Accumulated;
    for (size_t i = 0; i < numel; ++i) {
      const size_t at = i * sizeof(typename Traits::Stored);
      Accumulated sum = Traits::load(sources.front() + at);
      for (size_t k = 1; k < sources.size(); ++k) {
        sum = combine<Accumulated>(op, sum, Traits::load(sources[k] + at));
      }
      Traits::store(dst + at, divisor == 1 ? sum : static_cast<Accumulated>(sum / static_cast<Accumulated>(divisor)));
    }
  });
}

void scaleElements(DType dtype, std::byte* dst, const std::byte* src, size_t numel, double factor) {
  withDType(dtype, [&](auto traits) {
    using Traits = decltype(traits);
    using Accumulated = typename Traits::Accumulated;
    for (size_t i = 0; i < numel; ++i) {
      const size_t at = i * sizeof(typename Traits::Stored);
      Traits::store(dst + at, static_cast<Accumulated>(Traits::load(src + at) * static_cast<Accumulated>(factor)));
    }
  });
}

void castElements(DType to, std::byte* dst, DType from, const std::byte* src, size_t numel) {
  withDType(from, [&](auto from_traits) {
    withDType(to, [&](auto to_traits) {
      using From = decltype(from_traits);
      using To = decltype(to_traits);
      for (size_t i = 0; i < numel; ++i) {
        const auto value = From::load(src + i * sizeof(typename From::Stored));
        To::store(dst + i * sizeof(typename To::Stored), static_cast<typename To::Accumulated>(value));
      }
    });
  });
}

} // namespace pycomm
