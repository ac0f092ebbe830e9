#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.h"

namespace pycomm::cuda {

/// Where one gradient lies. A null `ptr` is a parameter without a gradient: zeros are packed, nothing is unpacked.
struct Gradient {
  void* ptr = nullptr;
  uint64_t numel = 0;
};

/// A run of a bucket that is one run of memory elsewhere, as kernels see it: it ends at `end`, counted in elements from
/// where its launch begins, and begins where the one before it ends.
struct Segment {
  void* ptr = nullptr;
  uint64_t end = 0;
};

/// As many as the arguments of one kernel have room for: 32,764 bytes from compute capability 7.0 on, with CUDA 12.1 or
/// later (CUDA C++ Programming Guide, "__global__ function argument processing").
inline constexpr size_t kMaxSegments = 1900;

/// What one kernel launch does: `count` segments from `first` on, for the bucket's elements [begin, begin + numel).
struct Launch {
  size_t first = 0;
  size_t count = 0;
  uint64_t begin = 0;
  uint64_t numel = 0;
};

struct BucketPlan {
  std::vector<Segment> segments;
  std::vector<Launch> launches;
  uint64_t numel = 0;
};

/// Lays gradients one behind the other, without gaps, in the order given: what csrc/ddp does with a bucket's slots.
/// Empty gradients vanish; neighbours in memory, and neighbours without memory, become one segment. Both `pack` and
/// `unpack` run from one plan, which holds as long as the gradients stay where they are.
///
/// Throws Error(InvalidArgument) for a pointer that does not fit its element, or sizes that do not fit an address.
[[nodiscard]] BucketPlan planBucket(
    const Gradient* gradients,
    size_t count,
    DType dtype,
    size_t max_segments = kMaxSegments);

} // namespace pycomm::cuda
