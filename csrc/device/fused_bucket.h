#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "device/device_runtime.h"
#include "device/kernel_args.h"

namespace pycomm::cuda {

/// The place of one gradient in memory. A null `ptr` is a parameter without a gradient: zeros are packed, nothing is unpacked.
struct Gradient {
  void* ptr = nullptr;
  uint64_t numel = 0;
};

/// One kernel launch: `count` segments from `first` on, for the bucket's elements [begin, begin + numel).
struct Launch {
  size_t first = 0;
  size_t count = 0;
  uint64_t begin = 0;
  uint64_t numel = 0;
};

/// How one bucket's gradients are packed and unpacked by few kernel launches.
struct FusedBucket {
  std::vector<Segment> segments;
  std::vector<Launch> launches;
  uint64_t numel = 0;
};

/// Lays gradients one behind the other, without gaps, in the order given, as csrc/ddp lays out a bucket's slots.
/// Empty gradients vanish; neighbours in memory, and neighbours without memory, become one segment. Both packBucket() and
/// unpackBucket() run from one plan, which holds as long as the gradients stay where they are.
///
/// Throws Error(InvalidArgument) for a pointer that does not fit its element, or sizes that do not fit an address.
[[nodiscard]] FusedBucket planFusedBucket(
    const Gradient* gradients,
    size_t count,
    DType dtype,
    size_t max_segments = kMaxSegments);

/// The arguments of one of the plan's launches. `wire_element` is the size of the bucket's elements.
[[nodiscard]] BucketArgs argsOf(
    const FusedBucket& plan,
    const Launch& launch,
    void* bucket,
    size_t wire_element,
    float factor,
    PackStats* stats);

/// All of a bucket: one launch per kMaxSegments gradients. `stats` may be null. Throws Error(Unsupported) if the device has no
/// kernel for these dtypes.
void packBucket(
    DeviceRuntime& runtime,
    const FusedBucket& plan,
    DType grad,
    DType wire,
    void* bucket,
    float factor,
    PackStats* stats,
    Stream stream);
/// From the bucket to the gradients; the bucket is only read.
void unpackBucket(
    DeviceRuntime& runtime,
    const FusedBucket& plan,
    DType grad,
    DType wire,
    void* bucket,
    float factor,
    Stream stream);

} // namespace pycomm::cuda
