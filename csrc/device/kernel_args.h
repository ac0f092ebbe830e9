#pragma once

#include <cstddef>
#include <cstdint>

#include "base/codec.h"

// The arguments of the device's kernels (csrc/cuda/kernels.cu): plain data of fixed widths, as they cross the table of
// libpycomm_cuda.so and as kernels receive them.

namespace pycomm::cuda {

/// A part of a bucket that is contiguous in the gradients' memory, too. It begins at the end of the segment before it, and ends at
/// `end`, in elements from the beginning of its launch. A null `ptr` stands for missing gradients: zeros are packed, nothing is unpacked.
struct Segment {
  void* ptr = nullptr;
  uint64_t end = 0;
};

/// As many as the arguments of one kernel have room for: 32,764 bytes from compute capability 7.0 on, with CUDA 12.1 or
/// later (CUDA C++ Programming Guide, "__global__ function argument processing").
inline constexpr size_t kMaxSegments = 1900;

/// Results of packing, in memory that the device can write. The caller sets them to zero.
struct PackStats {
  unsigned long long overflows = 0; ///< finite before, not finite after scaling and rounding
  uint32_t max_abs_bits = 0; ///< of the finite gradients, before scaling
  uint32_t non_finite = 0; ///< 1 if a gradient was infinite or NaN
};

/// What a rank writes behind an fp16 bucket about the largest of its gradients: see ScaledWire in ddp/wire.cc. Exact in fp16.
inline constexpr int kExponentBias = 200; ///< is added to frexp()'s exponent; 0 if all gradients are zero
inline constexpr int kNonFiniteCode = 512; ///< is added if a gradient is Inf or NaN

/// tail[rank] = the code of `stats`, the other elements = 0.
struct ExponentArgs {
  const PackStats* stats = nullptr;
  uint16_t* tail = nullptr; ///< fp16
  uint32_t numel = 0; ///< of the tail
  uint32_t rank = 0;
};

/// One launch of the pack or unpack kernel. `bucket` is the launch's first element, not the bucket's.
struct BucketArgs {
  void* bucket = nullptr;
  PackStats* stats = nullptr; ///< may be null
  uint64_t numel = 0;
  uint32_t count = 0; ///< of segments
  float factor = 1.0F;
  Segment segments[kMaxSegments];
};
static_assert(sizeof(BucketArgs) <= 32764, "all of a launch's arguments must fit");

/// The reduce kernel folds no more ranks than this: the pointers are its arguments.
inline constexpr uint32_t kMaxSources = 1024;

/// dst = the fold of `sources` in their order, divided by `divisor`.
struct ReduceArgs {
  void* dst = nullptr; ///< may be one of the sources
  uint64_t numel = 0;
  uint64_t head =
      0; ///< the launch computes this and the next (splitForVectors): elements before all pointers are aligned
  uint64_t vectors = 0; ///< of 16 bytes, after the head
  uint32_t count = 0; ///< of sources
  uint32_t divisor = 1; ///< AVG: the number of ranks
  const void* sources[kMaxSources];
};
static_assert(sizeof(ReduceArgs) <= 32764, "all of a launch's arguments must fit");

/// `parts` runs of `numel` values, each encoded from its own first value.
struct CodecArgs {
  Codec codec = Codec::None; ///< not None
  uint64_t numel = 0;
  uint64_t parts = 1;
  float* values = nullptr; ///< read by encoding, written by decoding
  uint8_t* encoded = nullptr;
  unsigned long long* overflows = nullptr; ///< encoding adds to it; may be null
};

} // namespace pycomm::cuda
