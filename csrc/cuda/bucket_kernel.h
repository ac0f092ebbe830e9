#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/element.h"
#include "device/kernel_args.h"

// The work of one thread in the kernels that pack and unpack a bucket. On the host the same functions are called for each thread in
// turn.
//
// The bucket is cut into tiles of kTile elements. A block of threads does one tile after the other. A tile's elements come
// from one segment or from several:
//
//     segments      |  a  |    b            | c |      d
//     bucket        0-----5-----------------17--19------ …
//     tiles         |    0    |    1    |    2    |          (of 8: tile 0 is a[0..5) and b[0..3))
//
// For each piece of a segment in the tile, `moveRun` moves elements in vectors of at most 16 bytes if both sides can be aligned at once,
// else one by one (still side by side, so that a warp's accesses join).

namespace pycomm::cuda {

inline constexpr uint32_t kTile = 8192; ///< elements
inline constexpr uint32_t kBlockThreads = 256;
inline constexpr uint32_t kUnroll = 4; ///< loads under way at once in a thread

PYCOMM_HD uint64_t tileCount(uint64_t numel) {
  return (numel + kTile - 1) / kTile;
}

/// The segment that holds an element of the launch.
PYCOMM_HD uint32_t segmentAt(const BucketArgs& args, uint64_t element) {
  uint32_t low = 0;
  uint32_t high = args.count - 1;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (args.segments[middle].end > element) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

/// Calls `run(pointer to the gradient's first element or null, first element of the launch, how many)` for each piece of
/// a segment in this tile. `element` is the size of the gradients' elements.
template <class Run>
PYCOMM_HD void forEachRun(const BucketArgs& args, uint64_t tile, size_t element, const Run& run) {
  uint64_t at = tile * kTile;
  const uint64_t end = args.numel - at < kTile ? args.numel : at + kTile;
  for (uint32_t s = segmentAt(args, at); at < end; ++s) {
    const uint64_t begin = s == 0 ? 0 : args.segments[s - 1].end;
    const uint64_t stop = args.segments[s].end < end ? args.segments[s].end : end;
    char* const base = static_cast<char*>(args.segments[s].ptr);
    run(base == nullptr ? nullptr : base + (at - begin) * element, at, static_cast<uint32_t>(stop - at));
    at = stop;
  }
}

template <class T, uint32_t Width>
struct alignas(sizeof(T) * Width) Vector {
  T lane[Width];
};

/// to[i] = each(from[i]) for the elements of this thread among `numel`.
template <class From, class To, class Each>
PYCOMM_HD void moveRun(To* to, const From* from, uint32_t numel, uint32_t thread, uint32_t threads, Each& each) {
  constexpr uint32_t kWidth = 16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
  using Loads = Vector<From, kWidth>;
  using Stores = Vector<To, kWidth>;
  const uint32_t past = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) / sizeof(From)) % kWidth;
  const uint32_t lead = (kWidth - past) % kWidth; // elements before `from` is aligned
  const bool aligned = reinterpret_cast<uintptr_t>(to + lead) % sizeof(Stores) == 0 && lead < numel;
  const uint32_t head = aligned ? lead : numel;
  const uint32_t vectors = aligned ? (numel - lead) / kWidth : 0;

  for (uint32_t i = thread; i < head; i += threads * kUnroll) {
    From loaded[kUnroll];
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t at = i + u * threads;
      loaded[u] = from[at < head ? at : i];
    }
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t at = i + u * threads;
      if (at < head) {
        to[at] = each(loaded[u]);
      }
    }
  }
  const Loads* const in = reinterpret_cast<const Loads*>(from + head);
  Stores* const out = reinterpret_cast<Stores*>(to + head);
  for (uint32_t v = thread; v < vectors; v += threads * kUnroll) {
    Loads loaded[kUnroll];
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t at = v + u * threads;
      loaded[u] = in[at < vectors ? at : v];
    }
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t at = v + u * threads;
      if (at < vectors) {
        Stores stored;
        for (uint32_t k = 0; k < kWidth; ++k) {
          stored.lane[k] = each(loaded[u].lane[k]);
        }
        out[at] = stored;
      }
    }
  }
  for (uint32_t i = head + vectors * kWidth + thread; i < numel; i += threads) {
    to[i] = each(from[i]);
  }
}

/// to[i] = zero.
template <class To>
PYCOMM_HD void zeroRun(To* to, uint32_t numel, uint32_t thread, uint32_t threads) {
  for (uint32_t i = thread; i < numel; i += threads) {
    to[i] = To{};
  }
}

/// Scales, rounds once to the wire's dtype, and measures the values.
template <class Grad, class Wire>
struct Packer {
  float factor;
  uint32_t overflows = 0;
  uint32_t max_abs_bits = 0; ///< of finite values
  uint32_t non_finite = 0; ///< 1 if there was another one

  PYCOMM_HD typename Wire::Stored operator()(typename Grad::Stored stored) {
    const float value = Grad::load(stored);
    const uint32_t magnitude = magnitudeBits(value);
    const bool finite = magnitude < kFloatInfinity;
    max_abs_bits = finite && magnitude > max_abs_bits ? magnitude : max_abs_bits;
    non_finite |= finite ? 0U : 1U;
    const typename Wire::Stored packed = Wire::store(value * factor);
    overflows += finite && !Wire::finite(packed) ? 1U : 0U;
    return packed;
  }
};

template <class Grad, class Wire>
struct Unpacker {
  float factor;

  PYCOMM_HD typename Grad::Stored operator()(typename Wire::Stored stored) {
    return Grad::store(Wire::load(stored) * factor);
  }
};

/// The code of the largest finite gradient, by integers alone: kExponentBias + frexp()'s exponent of a number above 0. kNonFiniteCode
/// more if there was an Inf or NaN.
PYCOMM_HD int exponentCode(uint32_t max_abs_bits, uint32_t non_finite) {
  const int flag = non_finite != 0 ? kNonFiniteCode : 0;
  if (max_abs_bits == 0) {
    return flag;
  }
  int exponent = static_cast<int>(max_abs_bits >> 23) - 126;
  if (max_abs_bits < 0x800000U) { // subnormal: its leading bit says how far below
    exponent = -149;
    for (uint32_t rest = max_abs_bits; rest != 0; rest >>= 1) {
      ++exponent;
    }
  }
  return kExponentBias + exponent + flag;
}

PYCOMM_HD void writeExponentShare(const ExponentArgs& args, uint32_t thread, uint32_t threads) {
  const int code = exponentCode(args.stats->max_abs_bits, args.stats->non_finite);
  for (uint32_t i = thread; i < args.numel; i += threads) {
    args.tail[i] = i == args.rank ? Half::store(static_cast<float>(code)) : uint16_t{0};
  }
}

template <class Grad, class Wire>
PYCOMM_HD void packTile(
    const BucketArgs& args,
    uint64_t tile,
    uint32_t thread,
    uint32_t threads,
    Packer<Grad, Wire>& packer) {
  auto* const bucket = static_cast<typename Wire::Stored*>(args.bucket);
  forEachRun(args, tile, sizeof(typename Grad::Stored), [&](char* grad, uint64_t at, uint32_t numel) {
    if (grad == nullptr) {
      zeroRun(bucket + at, numel, thread, threads);
    } else {
      moveRun(bucket + at, reinterpret_cast<const typename Grad::Stored*>(grad), numel, thread, threads, packer);
    }
  });
}

template <class Grad, class Wire>
PYCOMM_HD void unpackTile(const BucketArgs& args, uint64_t tile, uint32_t thread, uint32_t threads) {
  const auto* const bucket = static_cast<const typename Wire::Stored*>(args.bucket);
  Unpacker<Grad, Wire> unpacker{args.factor};
  forEachRun(args, tile, sizeof(typename Grad::Stored), [&](char* grad, uint64_t at, uint32_t numel) {
    if (grad != nullptr) {
      moveRun(reinterpret_cast<typename Grad::Stored*>(grad), bucket + at, numel, thread, threads, unpacker);
    }
  });
}

} // namespace pycomm::cuda
