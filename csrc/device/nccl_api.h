#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "device/device_runtime.h"

namespace pycomm::cuda {

// The part of NCCL's ABI that pycomm uses, declared here because this is built without NCCL's header. Numbers
// and layouts are NCCL's own and have not changed since the versions named (NCCL's documentation, "API").

/// ncclResult_t. InProgress: a communicator that was made non-blocking has not finished the call yet.
enum class NcclResult : int {
  Success = 0,
  UnhandledCudaError = 1,
  SystemError = 2,
  InternalError = 3,
  InvalidArgument = 4,
  InvalidUsage = 5,
  RemoteError = 6,
  InProgress = 7,
};

/// "ncclSystemError"; "ncclResult 12" for a number that is not in NcclResult.
[[nodiscard]] std::string ncclResultName(NcclResult result);

struct NcclUniqueId {
  char bytes[128] = {};
};

using NcclHandle = void*; ///< ncclComm_t

/// ncclDataType_t and ncclRedOp_t of one call.
struct NcclReduction {
  int dtype = 0;
  int op = 0;
  size_t count_per_element = 1; ///< 2 for complex numbers, which NCCL adds as pairs
};

/// NCCL's numbers for this reduction. Throws Error(Unsupported) if it has none. Bool is reduced as bytes of 0 and 1.
[[nodiscard]] NcclReduction ncclReduction(DType dtype, ReduceOp op);

inline constexpr int kNcclBytes = 1; ///< ncclUint8: operations that add nothing move bytes
inline constexpr int kNcclOldest = 21400; ///< 2.14: non-blocking communicators

/// NCCL, or a test's substitute. No function waits for another rank: communicators are non-blocking.
class NcclApi {
 public:
  virtual ~NcclApi() = default;

  [[nodiscard]] virtual std::string origin() const = 0; ///< "/…/libnccl.so.2, version 2.27.7"
  virtual NcclResult uniqueId(NcclUniqueId* id) = 0;
  virtual NcclResult init(NcclHandle* comm, int size, const NcclUniqueId& id, int rank) = 0;
  /// The result of the last call on `comm`, InProgress until it is known.
  virtual NcclResult asyncError(NcclHandle comm, NcclResult* state) = 0;
  virtual NcclResult abort(NcclHandle comm) = 0;
  virtual NcclResult destroy(NcclHandle comm) = 0;
  /// NCCL's own words about the last error; "" if it has none.
  [[nodiscard]] virtual std::string lastError(NcclHandle comm) = 0;

  virtual NcclResult groupStart() = 0;
  virtual NcclResult groupEnd() = 0;
  virtual NcclResult allReduce(
      const void* in,
      void* out,
      size_t count,
      int dtype,
      int op,
      NcclHandle comm,
      Stream stream) = 0;
  virtual NcclResult reduce(
      const void* in,
      void* out,
      size_t count,
      int dtype,
      int op,
      int root,
      NcclHandle comm,
      Stream stream) = 0;
  virtual NcclResult broadcast(
      const void* in,
      void* out,
      size_t count,
      int dtype,
      int root,
      NcclHandle comm,
      Stream stream) = 0;
  virtual NcclResult allGather(const void* in, void* out, size_t count, int dtype, NcclHandle comm, Stream stream) = 0;
  virtual NcclResult reduceScatter(
      const void* in,
      void* out,
      size_t count,
      int dtype,
      int op,
      NcclHandle comm,
      Stream stream) = 0;
  virtual NcclResult send(const void* in, size_t count, int dtype, int peer, NcclHandle comm, Stream stream) = 0;
  virtual NcclResult recv(void* out, size_t count, int dtype, int peer, NcclHandle comm, Stream stream) = 0;
};

/// Loads NCCL. It tries the one that is in the process already (torch's own), then each of `paths`, then libnccl.so.2 as the system's
/// loader finds it. Throws Error(Unsupported) with each of these places and the loader's answer for it.
[[nodiscard]] std::unique_ptr<NcclApi> loadNccl(const std::vector<std::string>& paths);

} // namespace pycomm::cuda
