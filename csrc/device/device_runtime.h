#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "device/kernel_args.h"

namespace pycomm::cuda {

using Stream = void*; ///< a cudaStream_t
using Event = void*; ///< a cudaEvent_t
/// `failure`: null, or the device's error. Calls nothing of CUDA's, and does not wait: the stream waits for it.
using Reached = void (*)(void* context, const char* failure);

/// All functions of CUDA that pycomm calls. In production libpycomm_cuda.so implements them (cuda_library.h). Tests use a recorder, or
/// host memory and threads.
///
/// Every call is for the calling thread's current device, which only setDevice() changes. Calls that put work onto a stream return at
/// once, unless the device's queues are full; so callers hold no lock that a Reached takes. Failures are
/// Error(OutOfMemory | SystemError | Unsupported) that name the call and have the runtime's own text.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;

  /// For pycomm's own threads. Callers on a user's thread set and restore its device with a c10::DeviceGuard.
  virtual void setDevice(int device) = 0;
  /// Throws Error(Unsupported) if the library has no code for the current device.
  virtual void checkDevice() = 0;
  /// Equal in two processes only if they use the same GPU, or the same part of one.
  [[nodiscard]] virtual std::string deviceUuid(int device) = 0;

  [[nodiscard]] virtual void* allocatePinned(size_t nbytes) = 0;
  virtual void freePinned(void* ptr) noexcept = 0;
  [[nodiscard]] virtual void* allocateDevice(size_t nbytes) = 0;
  virtual void freeDevice(void* ptr) noexcept = 0;

  /// Between host and device memory in any combination. The call blocks if host memory is not pinned.
  virtual void copy(void* dst, const void* src, size_t nbytes, Stream stream) = 0;

  [[nodiscard]] virtual Event createEvent() = 0;
  virtual void destroyEvent(Event event) noexcept = 0;
  virtual void record(Event event, Stream stream) = 0;
  /// Later work on `stream` waits for `event`. Does not block the caller.
  virtual void streamWait(Stream stream, Event event) = 0;

  /// A stream that waits for no other one unless streamWait() makes it.
  [[nodiscard]] virtual Stream createStream() = 0;
  virtual void destroyStream(Stream stream) noexcept = 0; ///< its queued work still runs
  /// Calls `reached(context, failure)`, once, on a thread of CUDA's, when the stream has done its work so far or has failed.
  virtual void whenReached(Stream stream, Reached reached, void* context) = 0;

  [[nodiscard]] virtual bool isCapturing(Stream stream) = 0;

  // Kernels: one launch each, of at least one element.

  /// `grad` and `wire` are the dtypes of the gradients and of the bucket. Returns false if there is no such kernel.
  [[nodiscard]] virtual bool pack(DType grad, DType wire, const BucketArgs& args, Stream stream) = 0;
  [[nodiscard]] virtual bool unpack(DType grad, DType wire, const BucketArgs& args, Stream stream) = 0;
  /// Writes the tail of an fp16 bucket. `args` has at least one element.
  virtual void writeExponent(const ExponentArgs& args, Stream stream) = 0;
  /// Whether reduce() has a kernel for these.
  [[nodiscard]] virtual bool hasReduce(DType dtype, ReduceOp op) = 0;
  virtual void reduce(DType dtype, ReduceOp op, const ReduceArgs& args, Stream stream) = 0;
  virtual void encode(const CodecArgs& args, Stream stream) = 0;
  virtual void decode(const CodecArgs& args, Stream stream) = 0;
};

/// Throws Error(Unsupported) if the device's reduce kernel cannot fold `count` ranks of this dtype and operation.
void checkReduce(DeviceRuntime& runtime, DType dtype, ReduceOp op, size_t count);

/// dst = the fold of `sources` in their order, divided by `divisor` for AVG. dst may be one of them.
void reduceInto(
    DeviceRuntime& runtime,
    DType dtype,
    ReduceOp op,
    void* dst,
    const void* const* sources,
    size_t count,
    uint64_t numel,
    uint32_t divisor,
    Stream stream);

} // namespace pycomm::cuda
