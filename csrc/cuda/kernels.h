#pragma once

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "cuda/bucket_kernel.h"
#include "cuda/codec_kernel.h"
#include "cuda/device_runtime.h"
#include "cuda/reduce_kernel.h"

namespace pycomm::cuda {

// One launch each, on a stream of the calling thread's current device: kernels.cu, the only file that needs nvcc. Whether
// the device took it, cudaGetLastError() knows. Throw Error(Unsupported) where there is no such kernel.

void launchPack(DType grad, DType wire, const BucketArgs& args, Stream stream);
void launchUnpack(DType grad, DType wire, const BucketArgs& args, Stream stream);
void launchReduce(DType dtype, ReduceOp op, const ReduceArgs& args, Stream stream);
void launchEncode(const CodecArgs& args, Stream stream);
void launchDecode(const CodecArgs& args, Stream stream);

/// Whether this library holds machine code, or PTX, for the calling thread's current device.
[[nodiscard]] bool deviceRunsKernels();

} // namespace pycomm::cuda
