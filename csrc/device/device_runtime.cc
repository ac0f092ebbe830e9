#include "device/device_runtime.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace pycomm::cuda {

void checkReduce(DeviceRuntime& runtime, DType dtype, ReduceOp op, size_t count) {
  if (const std::string why = whyUnsupported(op, dtype); !why.empty()) {
    throw Error(ErrorCode::InvalidArgument, why);
  }
  if (!runtime.hasReduce(dtype, op)) {
    const bool has_dtype = runtime.hasReduce(dtype, ReduceOp::Sum);
    throw Error(
        ErrorCode::Unsupported,
        std::string("the device's reduce kernel has no ") + (has_dtype ? reduceOpName(op) : dtypeName(dtype)) + ".",
        "cuda_mode=\"host\", which reduces on the CPU");
  }
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
  checkReduce(runtime, dtype, op, count);
  if (numel == 0) {
    return;
  }
  ReduceArgs args;
  args.dst = dst;
  args.numel = numel;
  args.count = static_cast<uint32_t>(count);
  args.divisor = op == ReduceOp::Avg ? divisor : 1;
  std::copy_n(sources, count, args.sources);
  runtime.reduce(dtype, op, args, stream);
}

} // namespace pycomm::cuda
