#include "cuda/c_nccl.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/c_errors.h"
#include "cuda/nccl_comm.h"

/// A communicator with the NCCL that it came from.
struct PycommCudaNccl {
  std::unique_ptr<pycomm::cuda::NcclApi> api; // outlives `comm`
  std::unique_ptr<pycomm::cuda::NcclComm> comm;
};

struct PycommCudaNcclWork {
  std::shared_ptr<pycomm::cuda::NcclOperation> operation;
};

namespace pycomm::cuda {
namespace {

NcclComm::Config configOf(const PycommCudaNcclConfig& given) {
  NcclComm::Config config;
  config.rank = given.rank;
  config.size = given.size;
  config.group = given.group;
  config.stream = given.stream;
  config.deadline = Deadline::after(given.timeout_ms);
  void* const context = given.context;
  config.exchange = [context, exchange = given.exchange](const NcclUniqueId* own, Deadline deadline) {
    NcclUniqueId id = own != nullptr ? *own : NcclUniqueId{};
    PycommCudaError error = {};
    constexpr int kDayMs = 24 * 3600 * 1000;
    if (exchange(context, id.bytes, own != nullptr ? 1 : 0, deadline.remainingMs(kDayMs), &error) != 0) {
      throw Error(recordOf(error));
    }
    return id;
  };
  config.group_failure = [context, failed = given.group_failure]() -> std::optional<ErrorRecord> {
    PycommCudaError error = {};
    return failed(context, &error) != 0 ? std::optional<ErrorRecord>(recordOf(error)) : std::nullopt;
  };
  return config;
}

uint16_t probe(const char* const* library_paths, size_t library_count, PycommCudaError* error) {
  return guarded(error, [&] { static_cast<void>(loadNccl({library_paths, library_paths + library_count})); });
}

uint16_t create(const PycommCudaNcclConfig* given, PycommCudaNccl** comm, PycommCudaError* error) {
  return guarded(error, [&] {
    auto made = std::make_unique<PycommCudaNccl>();
    made->api = loadNccl({given->library_paths, given->library_paths + given->library_count});
    made->comm = NcclComm::create(*made->api, theRuntime(), configOf(*given));
    *comm = made.release();
  });
}

void destroy(PycommCudaNccl* comm) {
  delete comm;
}

void origin(PycommCudaNccl* comm, char* text, size_t capacity) {
  const std::string said = comm->api->origin();
  const size_t length = std::min(said.size(), capacity - 1);
  std::memcpy(text, said.data(), length);
  text[length] = '\0';
}

// The caller may be of another build: its numbers are checked before they are used as enumerators.
void requireKnown(const NcclCall& call) {
  const auto kind = static_cast<int32_t>(call.kind);
  const auto algorithm = static_cast<int32_t>(call.algorithm);
  if (kind < 0 || kind > static_cast<int32_t>(NcclKind::Recv) || algorithm < 0 ||
      algorithm > static_cast<int32_t>(NcclAlgorithm::Direct)) {
    throw Error(ErrorCode::InvalidArgument, "a collective that this library does not know.");
  }
  static_cast<void>(dtypeOf(static_cast<uint8_t>(call.dtype)));
  static_cast<void>(opOf(static_cast<uint8_t>(call.op)));
}

uint16_t start(
    PycommCudaNccl* comm,
    const NcclCall* calls,
    size_t count,
    void* caller,
    int64_t timeout_ms,
    PycommCudaNcclWork** work,
    PycommCudaError* error) {
  return guarded(error, [&] {
    const std::vector<NcclCall> list(calls, calls + count);
    for (const NcclCall& call : list) {
      requireKnown(call);
    }
    auto made = std::make_unique<PycommCudaNcclWork>();
    made->operation = comm->comm->start(list, caller, Deadline::after(timeout_ms));
    *work = made.release();
  });
}

int done(PycommCudaNccl* comm, PycommCudaNcclWork* work) {
  return comm->comm->done(*work->operation) ? 1 : 0;
}

void freeWork(PycommCudaNcclWork* work) {
  delete work;
}

uint16_t poll(PycommCudaNccl* comm, PycommCudaError* error) {
  return guarded(error, [&] {
    comm->comm->poll();
    if (const auto failure = comm->comm->failure()) {
      throw Error(*failure);
    }
  });
}

void abort(PycommCudaNccl* comm, const PycommCudaError* reason) {
  comm->comm->abort(recordOf(*reason));
}

} // namespace

void addNccl(PycommCudaTable& table) {
  table.nccl_probe = probe;
  table.nccl_create = create;
  table.nccl_destroy = destroy;
  table.nccl_origin = origin;
  table.nccl_start = start;
  table.nccl_done = done;
  table.nccl_free_work = freeWork;
  table.nccl_poll = poll;
  table.nccl_abort = abort;
}

} // namespace pycomm::cuda
