#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "cuda/bucket_kernel.h"
#include "cuda/bucket_plan.h"
#include "cuda/codec_kernel.h"
#include "cuda/reduce_kernel.h"

namespace pycomm::cuda {

using Stream = void*; ///< a cudaStream_t
using Event = void*; ///< a cudaEvent_t
/// `failure`: null, or the device's error. Calls nothing of CUDA's, and does not wait: the stream does, meanwhile.
using Reached = void (*)(void* context, const char* failure);

/// What the rest of this folder wants of a device. CUDA's runtime is behind it in the library; tests put a recorder, or
/// host memory and threads, in its place.
///
/// Every call is for the calling thread's current device. That of a user's thread is never changed here: whoever calls this
/// library sets and restores it. What goes onto a stream returns at once, unless the device's queues are full; so no lock is
/// held that a Reached wants. Failures are Error(OutOfMemory | SystemError | Unsupported) that name the call and the
/// runtime's own text.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;

  /// For threads of this library's own.
  virtual void setDevice(int device) = 0;
  /// Throws Error(Unsupported) if this library has no code for the current device.
  virtual void checkDevice() = 0;
  /// The same for two processes only if they use the same GPU, or the same part of one.
  [[nodiscard]] virtual std::string deviceUuid(int device) = 0;

  [[nodiscard]] virtual void* allocatePinned(size_t nbytes) = 0;
  virtual void freePinned(void* ptr) noexcept = 0;
  [[nodiscard]] virtual void* allocateDevice(size_t nbytes) = 0;
  virtual void freeDevice(void* ptr) noexcept = 0;

  /// Between any of host and device memory; host memory is pinned, or the call blocks.
  virtual void copy(void* dst, const void* src, size_t nbytes, Stream stream) = 0;

  [[nodiscard]] virtual Event createEvent() = 0;
  virtual void destroyEvent(Event event) noexcept = 0;
  virtual void record(Event event, Stream stream) = 0;
  /// What is put onto `stream` from here on waits for `event`. Does not block the caller.
  virtual void streamWait(Stream stream, Event event) = 0;

  /// A stream that waits for no other one unless it is told to.
  [[nodiscard]] virtual Stream createStream() = 0;
  virtual void destroyStream(Stream stream) noexcept = 0; ///< what is on it still happens
  /// Calls `reached(context, failure)`, once, on a thread of CUDA's when the stream has done what it holds now, or never will.
  virtual void whenReached(Stream stream, Reached reached, void* context) = 0;

  [[nodiscard]] virtual bool isCapturing(Stream stream) = 0;

  /// Kernels: one launch each. `grad` and `wire` are the dtypes of the gradients and of the bucket.
  virtual void pack(DType grad, DType wire, const BucketArgs& args, Stream stream) = 0;
  virtual void unpack(DType grad, DType wire, const BucketArgs& args, Stream stream) = 0;
  virtual void reduce(DType dtype, ReduceOp op, const ReduceArgs& args, Stream stream) = 0;
  virtual void encode(const CodecArgs& args, Stream stream) = 0;
  virtual void decode(const CodecArgs& args, Stream stream) = 0;
};

/// The arguments of a plan's launches, one after the other: pack or unpack with them. `wire_element` is the size of the
/// bucket's elements.
[[nodiscard]] BucketArgs argsOf(
    const BucketPlan& plan,
    const Launch& launch,
    void* bucket,
    size_t wire_element,
    float factor,
    PackStats* stats);

/// All of a bucket: as many launches as the plan has, one up to kMaxSegments gradients.
void packBucket(
    DeviceRuntime& runtime,
    const BucketPlan& plan,
    DType grad,
    DType wire,
    void* bucket,
    float factor,
    PackStats* stats,
    Stream stream);
void unpackBucket(
    DeviceRuntime& runtime,
    const BucketPlan& plan,
    DType grad,
    DType wire,
    void* bucket,
    float factor,
    Stream stream);

/// Throws Error(Unsupported) if the reduce kernel has no such fold of `count` ranks.
void checkReduce(DType dtype, ReduceOp op, size_t count);

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
