#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "device/kernel_args.h"

// The interface of libpycomm_cuda.so: one exported function that returns a table of others. Each is one call of CUDA's
// runtime or one kernel launch, for the calling thread's current device. Streams and events are cudaStream_t and cudaEvent_t as
// void*. Only plain data of fixed widths crosses the table: no CUDA type and no exception.
//
// The library and the extension are built apart (another compiler, another machine), so the table states its version. Raise
// kPycommCudaVersion with every change of this header, of kernel_args.h, or of the enumerations of base/ that they use (DType,
// ReduceOp, Codec), also if only the meaning of a field changes.

namespace pycomm::cuda {

inline constexpr uint32_t kPycommCudaVersion = 7;
inline constexpr const char* kPycommCudaEntry = "pycomm_cuda_table";

inline constexpr int kCudaOutOfMemory = 2; ///< cudaErrorMemoryAllocation
inline constexpr int kCudaNoKernel = -1; ///< no cudaError_t: this library has no such kernel
inline constexpr int kCudaNoHostMemory = -2; ///< no cudaError_t: the process has no memory left

/// Functions that return an int return a cudaError_t, 0 for success.
struct CudaTable {
  uint32_t version;
  uint32_t nbytes; ///< of this struct

  /// "cudaErrorInvalidValue", and CUDA's sentence about it. The texts live until the calling thread's next call of CUDA, at least.
  const char* (*error_name)(int error);
  const char* (*error_text)(int error);

  int (*set_device)(int device);
  /// Whether this library has code for the current device; if not, the device's number and compute capability.
  int (*check_device)(int* has_code, int* device, int* major, int* minor);
  int (*device_uuid)(int device, unsigned char* uuid); ///< 16 bytes

  int (*allocate_pinned)(size_t nbytes, void** ptr);
  void (*free_pinned)(void* ptr);
  int (*allocate_device)(size_t nbytes, void** ptr);
  void (*free_device)(void* ptr);
  int (*copy)(void* dst, const void* src, size_t nbytes, void* stream);

  int (*create_event)(void** event);
  void (*destroy_event)(void* event);
  int (*record)(void* event, void* stream);
  int (*stream_wait)(void* stream, void* event);
  int (*create_stream)(void** stream);
  void (*destroy_stream)(void* stream);
  /// Host function: `reached` is called once, on a thread of CUDA's, if this returns 0. `failure` is the device's error, or null.
  int (*when_reached)(void* stream, void (*reached)(void* context, const char* failure), void* context);
  int (*is_capturing)(void* stream, int* capturing);

  int (*has_reduce)(DType dtype, ReduceOp op); ///< 1 or 0: whether `reduce` has such a kernel
  int (*pack)(DType grad, DType wire, const BucketArgs* args, void* stream);
  int (*unpack)(DType grad, DType wire, const BucketArgs* args, void* stream);
  int (*write_exponent)(const ExponentArgs* args, void* stream);
  int (*reduce)(DType dtype, ReduceOp op, const ReduceArgs* args, void* stream);
  int (*encode)(const CodecArgs* args, void* stream);
  int (*decode)(const CodecArgs* args, void* stream);
};

} // namespace pycomm::cuda

/// The one name that the library exports. The extension finds it by kPycommCudaEntry.
extern "C" __attribute__((visibility("default"))) const pycomm::cuda::CudaTable* pycomm_cuda_table();
