#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "numeric/small_float.h"

// Reads, combines and writes one element of each dtype. Every operation is commutative to the bit; only the grouping of
// a fold can change its rounding.

namespace pycomm::numeric {

/// An element stored as `Stored` and computed as `Acc`. Pointers may have any alignment.
template <class T>
struct Number {
  using Stored = T;
  using Acc = T;
  [[gnu::always_inline]] static Acc load(Stored value) noexcept {
    return value;
  }
  [[gnu::always_inline]] static Stored store(Acc value) noexcept {
    if constexpr (std::is_floating_point_v<T>) {
      return canonical(value);
    } else {
      return value;
    }
  }
};

template <class Format, class T>
struct Small {
  using Stored = T;
  using Acc = float;
  [[gnu::always_inline]] static Acc load(Stored value) noexcept {
    return Format::decode(value);
  }
  [[gnu::always_inline]] static Stored store(Acc value) noexcept {
    return Format::encode(value);
  }
};

using Half = Small<HalfFormat, uint16_t>;
using Bfloat16 = Small<Bfloat16Format, uint16_t>;
using E4m3 = Small<E4m3Format, uint8_t>;
using E5m2 = Small<E5m2Format, uint8_t>;

/// Any non-zero byte is true, as in a torch tensor viewed as bool; results are 0 or 1.
struct Boolean {
  using Stored = uint8_t;
  using Acc = uint8_t;
  [[gnu::always_inline]] static Acc load(Stored value) noexcept {
    return value != 0 ? 1 : 0;
  }
  [[gnu::always_inline]] static Stored store(Acc value) noexcept {
    return value;
  }
};

template <class T>
struct ComplexNumber {
  T re;
  T im;
};

template <class T>
struct Complex {
  using Stored = ComplexNumber<T>;
  using Acc = ComplexNumber<T>;
  [[gnu::always_inline]] static Acc load(Stored value) noexcept {
    return value;
  }
  [[gnu::always_inline]] static Stored store(Acc value) noexcept {
    return {canonical(value.re), canonical(value.im)};
  }
};

template <class Element>
[[gnu::always_inline]] inline typename Element::Acc loadAt(const void* from, size_t index) noexcept {
  typename Element::Stored value;
  std::memcpy(&value, static_cast<const std::byte*>(from) + index * sizeof value, sizeof value);
  return Element::load(value);
}

template <class Element>
[[gnu::always_inline]] inline void storeAt(void* to, size_t index, typename Element::Acc acc) noexcept {
  const typename Element::Stored value = Element::store(acc);
  std::memcpy(static_cast<std::byte*>(to) + index * sizeof value, &value, sizeof value);
}

/// Unsigned and at least as wide as int: int16 products do not overflow in int, and wider ones wrap by definition.
template <class T>
using Wrapping = std::conditional_t<(sizeof(T) < sizeof(unsigned)), unsigned, std::make_unsigned_t<T>>;

struct Add {
  template <class T>
  [[gnu::always_inline]] static T apply(T a, T b) noexcept {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    } else {
      return a + b;
    }
  }
};

struct Multiply {
  template <class T>
  [[gnu::always_inline]] static T apply(T a, T b) noexcept {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    } else {
      return a * b;
    }
  }
  /// The plain formula, as torch and numpy have it; C's Annex G would repair some infinities.
  template <class T>
  [[gnu::always_inline]] static ComplexNumber<T> apply(ComplexNumber<T> a, ComplexNumber<T> b) noexcept {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

/// For floats IEEE 754-2019 minimum: NaN wins, and -0 is below +0. Of two equal numbers only zeros have different bits,
/// and or-ing them sets the sign if either has it.
struct Minimum {
  template <class T>
  [[gnu::always_inline]] static T apply(T a, T b) noexcept {
    if constexpr (std::is_floating_point_v<T>) {
      using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
      const T same = bitCast<T>(bitCast<Bits>(a) | bitCast<Bits>(b));
      const T ordered = a < b ? a : (b < a ? b : same);
      return a != a ? a : (b != b ? b : ordered);
    } else {
      return a < b ? a : b;
    }
  }
};

struct Maximum {
  template <class T>
  [[gnu::always_inline]] static T apply(T a, T b) noexcept {
    if constexpr (std::is_floating_point_v<T>) {
      using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
      const T same = bitCast<T>(bitCast<Bits>(a) & bitCast<Bits>(b));
      const T ordered = a < b ? b : (b < a ? a : same);
      return a != a ? a : (b != b ? b : ordered);
    } else {
      return a < b ? b : a;
    }
  }
};

struct BitAnd {
  template <class T>
  [[gnu::always_inline]] static T apply(T a, T b) noexcept {
    return static_cast<T>(a & b);
  }
};

struct BitOr {
  template <class T>
  [[gnu::always_inline]] static T apply(T a, T b) noexcept {
    return static_cast<T>(a | b);
  }
};

struct BitXor {
  template <class T>
  [[gnu::always_inline]] static T apply(T a, T b) noexcept {
    return static_cast<T>(a ^ b);
  }
};

} // namespace pycomm::numeric
