#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/reduce_op.h"

// libpycomm_cuda.so as the floors above see it: one exported function that gives a table of others. No CUDA type, no
// exception and nothing but plain data of fixed widths crosses it; streams and events are cudaStream_t and cudaEvent_t as void*.
//
// The library and the extension are built apart (another compiler, another machine), so the table says its version.
// Whatever changes here, also the meaning of a field, raises kPycommCudaVersion.

#define PYCOMM_CUDA_VERSION 5
#define PYCOMM_CUDA_ENTRY "pycomm_cuda_table"

namespace pycomm::cuda {

enum class NcclKind : int32_t { AllReduce, Reduce, Broadcast, AllGather, ReduceScatter, AllToAll, Send, Recv };

/// How an all_reduce is done. Ring and Direct move with ncclSend and ncclRecv and add with pycomm's reduce kernel.
enum class NcclAlgorithm : int32_t {
  Nccl, ///< ncclAllReduce
  Ring, ///< 2 (N-1) steps of 1/N; a small float is rounded once a hop
  Direct, ///< everyone sends everyone its part; added in fp32 in rank order, rounded once
};

/// Elements for each rank. Borrowed until the call returns.
struct NcclCounts {
  const uint64_t* by_rank = nullptr;
  uint64_t ranks = 0;
};

/// What one rank asks NCCL for, from c10d to NcclComm. Sizes are in elements.
struct NcclCall {
  NcclKind kind = NcclKind::AllReduce;
  NcclAlgorithm algorithm = NcclAlgorithm::Nccl; ///< AllReduce
  const void* input = nullptr;
  void* output = nullptr;
  uint64_t numel = 0; ///< of the whole tensor; of one rank's part for AllGather and ReduceScatter
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  int32_t peer = 0; ///< the root, or the other side of Send and Recv
  NcclCounts send_counts; ///< AllToAll
  NcclCounts recv_counts;
  const char* name = "all_reduce"; ///< for errors; lives for ever
  int64_t sequence = -1;
};

} // namespace pycomm::cuda

extern "C" {

/// Why a call failed: the fields of pycomm::ErrorRecord that this library fills in. `code` is a pycomm::ErrorCode; texts are cut at
/// their buffers' ends. c_error_record.h converts both ways.
typedef struct PycommCudaError {
  uint16_t code;
  char summary[512];
  char hint[256];
  char cause[512];
  int32_t rank;
  int32_t peer;
  int64_t sequence;
  int64_t numel;
  int64_t elapsed_ms;
  char op[48];
  char dtype[24];
  char phase[24];
  char group[128];
} PycommCudaError;

/// One gradient of a bucket; null `ptr`: zeros are packed, nothing is unpacked.
typedef struct PycommCudaGradient {
  void* ptr;
  uint64_t numel;
} PycommCudaGradient;

/// In device memory, or pinned; set to zero by the caller.
typedef struct PycommCudaPackStats {
  unsigned long long overflows;
  uint32_t max_abs_bits;
  uint32_t reserved;
} PycommCudaPackStats;

typedef struct PycommCudaStager PycommCudaStager; ///< pinned memory and copies of one device

typedef struct PycommCudaCopy {
  void* device;
  void* host; ///< within a block of stager_take
  size_t nbytes;
} PycommCudaCopy;

typedef struct PycommCudaNccl PycommCudaNccl; ///< a communicator
typedef struct PycommCudaNcclWork PycommCudaNcclWork; ///< one operation of it

typedef struct PycommCudaNcclConfig {
  int rank;
  int size;
  const char* group;
  void* stream; ///< the side stream
  int64_t timeout_ms; ///< of the making
  const char* const* library_paths; ///< where to look for NCCL; `library_count` of them
  size_t library_count;
  void* context; ///< for the two functions below, which may be called until the communicator is destroyed
  /// Rank 0: publish the 128 bytes of `id`. Others: write them. Returns 0, or a code with `error` filled in.
  uint16_t (*exchange)(void* context, char* id, int publish, int64_t timeout_ms, PycommCudaError* error);
  /// 1 with `error` filled in if the group has failed, else 0.
  int (*group_failure)(void* context, PycommCudaError* error);
} PycommCudaNcclConfig;

/// All functions may be called by any thread. They return 0, or the code that `error` holds. They work on the calling thread's current
/// device and never change it: who calls them sets it, as torch's device guards do, and restores it.
typedef struct PycommCudaTable {
  uint32_t version;
  uint32_t nbytes; ///< of this struct

  /// Refuses (Unsupported) a current device that this library has no code for.
  uint16_t (*check_device)(PycommCudaError* error);
  /// The same in two processes only if they use the same GPU, or the same part of one.
  uint16_t (*device_uuid)(int device, char* text, size_t capacity, PycommCudaError* error);
  uint16_t (*copy)(void* dst, const void* src, size_t nbytes, void* stream, PycommCudaError* error);
  uint16_t (*is_capturing)(void* stream, int* capturing, PycommCudaError* error);

  /// The fused bucket: one launch for up to 1,900 gradients. `grad` and `wire` are pycomm::DType numbers.
  uint16_t (*pack)(
      const PycommCudaGradient* gradients,
      size_t count,
      uint8_t grad,
      uint8_t wire,
      void* bucket,
      float factor,
      PycommCudaPackStats* stats,
      void* stream,
      PycommCudaError* error);
  uint16_t (*unpack)(
      const PycommCudaGradient* gradients,
      size_t count,
      uint8_t grad,
      uint8_t wire,
      const void* bucket,
      float factor,
      void* stream,
      PycommCudaError* error);
  /// dst = the fold of `count` sources in their order; AVG divides by `divisor`.
  uint16_t (*reduce)(
      uint8_t dtype,
      uint8_t op,
      void* dst,
      const void* const* sources,
      size_t count,
      uint64_t numel,
      uint32_t divisor,
      void* stream,
      PycommCudaError* error);

  /// The wire codecs of fp32 values, as on the CPU: `codec` is pycomm::Codec's number. `parts` runs of `numel` values, each encoded from
  /// its own first value. `overflows` is added to; may be null.
  uint16_t (*encode)(
      uint8_t codec,
      const float* values,
      uint64_t numel,
      uint64_t parts,
      void* encoded,
      unsigned long long* overflows,
      void* stream,
      PycommCudaError* error);
  uint16_t (*decode)(
      uint8_t codec,
      const void* encoded,
      uint64_t numel,
      uint64_t parts,
      float* values,
      void* stream,
      PycommCudaError* error);

  /// pycomm::cuda::Stager. `ready` is called on the stager's thread, for all copies together or for each (`apart`): how many
  /// have ended, or why no more can. The call with `count`, or a failure, is the last; none if stager_to_host fails.
  uint16_t (*stager_create)(int device, void* out, void* in, PycommCudaStager** stager, PycommCudaError* error);
  void (*stager_destroy)(PycommCudaStager* stager);
  /// Ends its thread, after at most `drain_ms`; stager_to_host fails from then on.
  void (*stager_stop)(PycommCudaStager* stager, int64_t drain_ms);
  uint16_t (*stager_take)(PycommCudaStager* stager, size_t nbytes, void** block, PycommCudaError* error);
  /// `copied`: copies of stager_to_device may still read the block.
  uint16_t (*stager_give)(PycommCudaStager* stager, void* block, int copied, PycommCudaError* error);
  uint16_t (*stager_to_host)(
      PycommCudaStager* stager,
      const PycommCudaCopy* copies,
      size_t count,
      void* caller,
      int apart,
      void (*ready)(void* context, size_t ended, const PycommCudaError* failure),
      void* context,
      PycommCudaError* error);
  uint16_t (
      *stager_to_device)(PycommCudaStager* stager, const PycommCudaCopy* copies, size_t count, PycommCudaError* error);
  uint16_t (*stager_wait_on)(PycommCudaStager* stager, void* stream, PycommCudaError* error);

  /// Whether NCCL can be loaded from where nccl_create would.
  uint16_t (*nccl_probe)(const char* const* library_paths, size_t library_count, PycommCudaError* error);
  uint16_t (*nccl_create)(const PycommCudaNcclConfig* config, PycommCudaNccl** comm, PycommCudaError* error);
  void (*nccl_destroy)(PycommCudaNccl* comm);
  /// "…/libnccl.so.2, version 2.27.7"
  void (*nccl_origin)(PycommCudaNccl* comm, char* text, size_t capacity);
  uint16_t (*nccl_start)(
      PycommCudaNccl* comm,
      const pycomm::cuda::NcclCall* calls,
      size_t count,
      void* caller,
      int64_t timeout_ms,
      PycommCudaNcclWork** work,
      PycommCudaError* error);
  int (*nccl_done)(PycommCudaNccl* comm, PycommCudaNcclWork* work);
  void (*nccl_free_work)(PycommCudaNcclWork* work);
  /// To be called every few milliseconds while anything is under way: 0, or the communicator's failure. Calls nothing of CUDA's, so
  /// that a device that another thread waits for cannot hold it up.
  uint16_t (*nccl_poll)(PycommCudaNccl* comm, PycommCudaError* error);
  void (*nccl_abort)(PycommCudaNccl* comm, const PycommCudaError* reason);
} PycommCudaTable;

typedef const PycommCudaTable* (*PycommCudaEntry)(void);

#if defined(PYCOMM_CUDA_LIBRARY)
/// The one exported name.
__attribute__((visibility("default"))) const PycommCudaTable* pycomm_cuda_table(void);
#endif
}
