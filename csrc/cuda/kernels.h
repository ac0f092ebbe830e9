#pragma once

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "device/kernel_args.h"

namespace pycomm::cuda {

// One launch each, on a stream (a cudaStream_t) of the calling thread's current device: kernels.cu. cudaGetLastError() has the
// launch's result. Those of several dtypes return false if there is no such kernel.

[[nodiscard]] bool launchPack(DType grad, DType wire, const BucketArgs& args, void* stream);
[[nodiscard]] bool launchUnpack(DType grad, DType wire, const BucketArgs& args, void* stream);
void launchExponent(const ExponentArgs& args, void* stream);
[[nodiscard]] bool launchReduce(DType dtype, ReduceOp op, const ReduceArgs& args, void* stream);
void launchEncode(const CodecArgs& args, void* stream);
void launchDecode(const CodecArgs& args, void* stream);

/// Whether this library holds machine code, or PTX, for the calling thread's current device.
[[nodiscard]] bool deviceRunsKernels();

} // namespace pycomm::cuda
