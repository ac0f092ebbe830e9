#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/bucket_kernel.h"
#include "cuda/element.h"
#include "device/kernel_args.h"

// The work of one thread in the reduce kernel: several ranks' elements, folded in the order given (lower rank first) in
// one accumulator, fp32 for all floats but fp64, divided once for AVG, and rounded once.

namespace pycomm::cuda {

/// Sets `head` and `vectors`: plain arithmetic on pointers, done once per launch on the host. `head` is numel if the pointers are
/// never aligned together.
PYCOMM_HD void splitForVectors(ReduceArgs& args, size_t element) {
  const uintptr_t dst = reinterpret_cast<uintptr_t>(args.dst);
  bool alike = true;
  for (uint32_t s = 0; s < args.count; ++s) {
    alike = alike && (reinterpret_cast<uintptr_t>(args.sources[s]) - dst) % 16 == 0;
  }
  const uint64_t lead = ((16 - dst % 16) % 16) / element;
  if (!alike || lead >= args.numel) {
    args.head = args.numel;
    args.vectors = 0;
    return;
  }
  args.head = lead;
  args.vectors = (args.numel - lead) * element / 16;
}

/// Integers wrap: two's complement makes signed sums and products the same bits as unsigned ones, which may.
template <class T>
using Wrapping = std::conditional_t<(sizeof(T) < sizeof(unsigned)), unsigned, std::make_unsigned_t<T>>;

struct SumOf {
  template <class T>
  PYCOMM_HD static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    } else {
      return a + b;
    }
  }
};

struct ProductOf {
  template <class T>
  PYCOMM_HD static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    } else {
      return a * b;
    }
  }
};

PYCOMM_HD bool signBit(float value) {
  return (floatBits(value) >> 31) != 0;
}

PYCOMM_HD bool signBit(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (bits >> 63) != 0;
}

// For floats IEEE 754-2019 minimum and maximum: NaN wins, and -0 is below +0. Of two equal numbers only zeros differ.
struct MinimumOf {
  template <class T>
  PYCOMM_HD static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      if (a != a || (a == b && signBit(a))) {
        return a;
      }
    }
    return a < b ? a : b;
  }
};

struct MaximumOf {
  template <class T>
  PYCOMM_HD static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      if (a != a || (a == b && !signBit(a))) {
        return a;
      }
    }
    return b < a ? a : b;
  }
};

template <class Acc>
PYCOMM_HD Acc divided(Acc value, uint32_t divisor) {
  return divisor == 1 ? value : value / static_cast<Acc>(divisor);
}

template <class Element, class Op>
PYCOMM_HD void reduceOne(const ReduceArgs& args, uint64_t at) {
  using Stored = typename Element::Stored;
  typename Element::Acc acc = Element::load(static_cast<const Stored*>(args.sources[0])[at]);
  for (uint32_t s = 1; s < args.count; ++s) {
    acc = Op::apply(acc, Element::load(static_cast<const Stored*>(args.sources[s])[at]));
  }
  static_cast<Stored*>(args.dst)[at] = Element::store(divided(acc, args.divisor));
}

template <class Element, class Op>
PYCOMM_HD void reduceVector(const ReduceArgs& args, uint64_t vector) {
  using Stored = typename Element::Stored;
  constexpr uint32_t kWidth = 16 / sizeof(Stored);
  using Loads = Vector<Stored, kWidth>;
  const auto load = [&](uint32_t s) {
    return reinterpret_cast<const Loads*>(static_cast<const Stored*>(args.sources[s]) + args.head)[vector];
  };
  typename Element::Acc acc[kWidth];
  Loads loaded = load(0);
  for (uint32_t k = 0; k < kWidth; ++k) {
    acc[k] = Element::load(loaded.lane[k]);
  }
  for (uint32_t s = 1; s < args.count; ++s) {
    loaded = load(s);
    for (uint32_t k = 0; k < kWidth; ++k) {
      acc[k] = Op::apply(acc[k], Element::load(loaded.lane[k]));
    }
  }
  for (uint32_t k = 0; k < kWidth; ++k) {
    loaded.lane[k] = Element::store(divided(acc[k], args.divisor));
  }
  reinterpret_cast<Loads*>(static_cast<Stored*>(args.dst) + args.head)[vector] = loaded;
}

/// The share of thread `thread` of `threads` in the whole launch.
template <class Element, class Op>
PYCOMM_HD void reduceShare(const ReduceArgs& args, uint64_t thread, uint64_t threads) {
  constexpr uint64_t kWidth = 16 / sizeof(typename Element::Stored);
  for (uint64_t i = thread; i < args.head; i += threads) {
    reduceOne<Element, Op>(args, i);
  }
  for (uint64_t v = thread; v < args.vectors; v += threads) {
    reduceVector<Element, Op>(args, v);
  }
  for (uint64_t i = args.head + args.vectors * kWidth + thread; i < args.numel; i += threads) {
    reduceOne<Element, Op>(args, i);
  }
}

} // namespace pycomm::cuda
