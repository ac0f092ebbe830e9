#include "cuda/device_runtime.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "cuda/dispatch.h"

namespace pycomm::cuda {

BucketArgs argsOf(
    const BucketPlan& plan,
    const Launch& launch,
    void* bucket,
    size_t wire_element,
    float factor,
    PackStats* stats) {
  BucketArgs args;
  args.bucket = static_cast<std::byte*>(bucket) + launch.begin * wire_element;
  args.stats = stats;
  args.numel = launch.numel;
  args.count = static_cast<uint32_t>(launch.count);
  args.factor = factor;
  std::copy_n(plan.segments.begin() + static_cast<std::ptrdiff_t>(launch.first), launch.count, args.segments);
  return args;
}

void packBucket(
    DeviceRuntime& runtime,
    const BucketPlan& plan,
    DType grad,
    DType wire,
    void* bucket,
    float factor,
    PackStats* stats,
    Stream stream) {
  for (const Launch& launch : plan.launches) {
    runtime.pack(grad, wire, argsOf(plan, launch, bucket, elementSize(wire), factor, stats), stream);
  }
}

void unpackBucket(
    DeviceRuntime& runtime,
    const BucketPlan& plan,
    DType grad,
    DType wire,
    void* bucket,
    float factor,
    Stream stream) {
  for (const Launch& launch : plan.launches) {
    runtime.unpack(grad, wire, argsOf(plan, launch, bucket, elementSize(wire), factor, nullptr), stream);
  }
}

void checkReduce(DType dtype, ReduceOp op, size_t count) {
  withFold(dtype, op, [](auto) {});
  if (count == 0 || count > kMaxSources) {
    throw Error(
        ErrorCode::Unsupported,
        "the device's reduce kernel folds 1 to " + std::to_string(kMaxSources) + " ranks, not " +
            std::to_string(count) + ".",
        "algorithm=\"ring\"");
  }
}

void reduceInto(
    DeviceRuntime& runtime,
    DType dtype,
    ReduceOp op,
    void* dst,
    const void* const* sources,
    size_t count,
    uint64_t numel,
    uint32_t divisor,
    Stream stream) {
  checkReduce(dtype, op, count);
  if (numel == 0) {
    return;
  }
  ReduceArgs args;
  args.dst = dst;
  args.numel = numel;
  args.count = static_cast<uint32_t>(count);
  args.divisor = op == ReduceOp::Avg ? divisor : 1;
  std::copy_n(sources, count, args.sources);
  splitForVectors(args, elementSize(dtype));
  runtime.reduce(dtype, op, args, stream);
}

} // namespace pycomm::cuda
