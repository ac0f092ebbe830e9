#include "device/fused_bucket.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace pycomm::cuda {
namespace {

constexpr uint64_t kMaxNbytes = uint64_t{1} << 47; // a device's addresses have no more bits

void check(const Gradient& gradient, size_t index, size_t element, uint64_t before) {
  const std::string name = "gradient " + std::to_string(index) + " of the bucket";
  if (gradient.numel > kMaxNbytes / element - before) {
    throw Error(
        ErrorCode::InvalidArgument,
        name + " has " + std::to_string(gradient.numel) + " elements: more than a device can hold.",
        "report this: no tensor is that large");
  }
  if (reinterpret_cast<uintptr_t>(gradient.ptr) % element != 0) {
    throw Error(
        ErrorCode::InvalidArgument,
        name + " does not lie at a multiple of its element's " + std::to_string(element) + " bytes.",
        "pass gradient.clone()");
  }
}

/// Whether `next` goes on where `ptr` with `numel` elements ends; two without memory do.
bool continues(const void* ptr, uint64_t numel, const void* next, size_t element) {
  if (ptr == nullptr || next == nullptr) {
    return ptr == next;
  }
  return static_cast<const std::byte*>(ptr) + numel * element == next;
}

[[noreturn]] void refusePair(DType grad, DType wire) {
  throw Error(
      ErrorCode::Unsupported,
      std::string("there is no kernel that packs ") + dtypeName(grad) + " gradients as " + dtypeName(wire) + ".",
      "wire_dtype of the gradients' own type");
}

} // namespace

FusedBucket planFusedBucket(const Gradient* gradients, size_t count, DType dtype, size_t max_segments) {
  const size_t element = elementSize(dtype);
  FusedBucket plan;
  uint64_t begin_of_last = 0; // in the bucket
  for (size_t i = 0; i < count; ++i) {
    const Gradient& gradient = gradients[i];
    if (gradient.numel == 0) {
      continue;
    }
    check(gradient, i, element, plan.numel);
    const bool joins = !plan.segments.empty() &&
        continues(plan.segments.back().ptr, plan.numel - begin_of_last, gradient.ptr, element);
    if (!joins) {
      if (plan.launches.empty() || plan.launches.back().count == max_segments) {
        plan.launches.push_back({plan.segments.size(), 0, plan.numel, 0});
      }
      plan.segments.push_back({gradient.ptr, 0});
      plan.launches.back().count += 1;
      begin_of_last = plan.numel;
    }
    plan.numel += gradient.numel;
    Launch& launch = plan.launches.back();
    launch.numel = plan.numel - launch.begin;
    plan.segments.back().end = launch.numel;
  }
  return plan;
}

BucketArgs argsOf(
    const FusedBucket& plan,
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
    const FusedBucket& plan,
    DType grad,
    DType wire,
    void* bucket,
    float factor,
    PackStats* stats,
    Stream stream) {
  for (const Launch& launch : plan.launches) {
    if (!runtime.pack(grad, wire, argsOf(plan, launch, bucket, elementSize(wire), factor, stats), stream)) {
      refusePair(grad, wire);
    }
  }
}

void unpackBucket(
    DeviceRuntime& runtime,
    const FusedBucket& plan,
    DType grad,
    DType wire,
    void* bucket,
    float factor,
    Stream stream) {
  for (const Launch& launch : plan.launches) {
    if (!runtime.unpack(grad, wire, argsOf(plan, launch, bucket, elementSize(wire), factor, nullptr), stream)) {
      refusePair(grad, wire);
    }
  }
}

} // namespace pycomm::cuda
