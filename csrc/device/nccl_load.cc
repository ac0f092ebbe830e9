// NCCL by dlopen: no header and no library of it are needed to build.
#include <dlfcn.h>

#include <memory>
#include <string>

#include "base/error.h"
#include "device/nccl_api.h"

namespace pycomm::cuda {
namespace {

/// ncclConfig_t of 2.14. NCCL reads as many bytes as `size` says, and gives what later versions added its defaults
/// because `version` is older than they are.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kNcclOldest;
  int blocking = 0;
};

/// The functions by NCCL's names; a result is an ncclResult_t.
struct Functions {
  int (*ncclGetVersion)(int*) = nullptr;
  int (*ncclGetUniqueId)(NcclUniqueId*) = nullptr;
  int (*ncclCommInitRankConfig)(NcclHandle*, int, NcclUniqueId, int, Config*) = nullptr;
  int (*ncclCommGetAsyncError)(NcclHandle, int*) = nullptr;
  int (*ncclCommAbort)(NcclHandle) = nullptr;
  int (*ncclCommDestroy)(NcclHandle) = nullptr;
  const char* (*ncclGetLastError)(NcclHandle) = nullptr;
  int (*ncclGroupStart)() = nullptr;
  int (*ncclGroupEnd)() = nullptr;
  int (*ncclAllReduce)(const void*, void*, size_t, int, int, NcclHandle, Stream) = nullptr;
  int (*ncclReduce)(const void*, void*, size_t, int, int, int, NcclHandle, Stream) = nullptr;
  int (*ncclBroadcast)(const void*, void*, size_t, int, int, NcclHandle, Stream) = nullptr;
  int (*ncclAllGather)(const void*, void*, size_t, int, NcclHandle, Stream) = nullptr;
  int (*ncclReduceScatter)(const void*, void*, size_t, int, int, NcclHandle, Stream) = nullptr;
  int (*ncclSend)(const void*, size_t, int, int, NcclHandle, Stream) = nullptr;
  int (*ncclRecv)(void*, size_t, int, int, NcclHandle, Stream) = nullptr;
};

template <class Function>
void find(void* library, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr) {
    missing += missing.empty() ? name : std::string(", ") + name;
  }
}

/// Fills in all functions; returns the names of those that are not there.
std::string findAll(void* library, Functions& f) {
  std::string missing;
  find(library, "ncclGetVersion", f.ncclGetVersion, missing);
  find(library, "ncclGetUniqueId", f.ncclGetUniqueId, missing);
  find(library, "ncclCommInitRankConfig", f.ncclCommInitRankConfig, missing);
  find(library, "ncclCommGetAsyncError", f.ncclCommGetAsyncError, missing);
  find(library, "ncclCommAbort", f.ncclCommAbort, missing);
  find(library, "ncclCommDestroy", f.ncclCommDestroy, missing);
  find(library, "ncclGetLastError", f.ncclGetLastError, missing);
  find(library, "ncclGroupStart", f.ncclGroupStart, missing);
  find(library, "ncclGroupEnd", f.ncclGroupEnd, missing);
  find(library, "ncclAllReduce", f.ncclAllReduce, missing);
  find(library, "ncclReduce", f.ncclReduce, missing);
  find(library, "ncclBroadcast", f.ncclBroadcast, missing);
  find(library, "ncclAllGather", f.ncclAllGather, missing);
  find(library, "ncclReduceScatter", f.ncclReduceScatter, missing);
  find(library, "ncclSend", f.ncclSend, missing);
  find(library, "ncclRecv", f.ncclRecv, missing);
  return missing;
}

NcclResult asResult(int result) {
  return static_cast<NcclResult>(result);
}

class LoadedNccl final : public NcclApi {
 public:
  LoadedNccl(const Functions& functions, std::string origin) : f_(functions), origin_(std::move(origin)) {}

  std::string origin() const override {
    return origin_;
  }
  NcclResult uniqueId(NcclUniqueId* id) override {
    return asResult(f_.ncclGetUniqueId(id));
  }
  NcclResult init(NcclHandle* comm, int size, const NcclUniqueId& id, int rank) override {
    Config config;
    return asResult(f_.ncclCommInitRankConfig(comm, size, id, rank, &config));
  }
  NcclResult asyncError(NcclHandle comm, NcclResult* state) override {
    int number = 0;
    const NcclResult result = asResult(f_.ncclCommGetAsyncError(comm, &number));
    *state = asResult(number);
    return result;
  }
  NcclResult abort(NcclHandle comm) override {
    return asResult(f_.ncclCommAbort(comm));
  }
  NcclResult destroy(NcclHandle comm) override {
    return asResult(f_.ncclCommDestroy(comm));
  }
  std::string lastError(NcclHandle comm) override {
    const char* const text = f_.ncclGetLastError(comm);
    return text == nullptr ? "" : text;
  }
  NcclResult groupStart() override {
    return asResult(f_.ncclGroupStart());
  }
  NcclResult groupEnd() override {
    return asResult(f_.ncclGroupEnd());
  }
  NcclResult allReduce(const void* in, void* out, size_t count, int dtype, int op, NcclHandle comm, Stream stream)
      override {
    return asResult(f_.ncclAllReduce(in, out, count, dtype, op, comm, stream));
  }
  NcclResult reduce(
      const void* in,
      void* out,
      size_t count,
      int dtype,
      int op,
      int root,
      NcclHandle comm,
      Stream stream) override {
    return asResult(f_.ncclReduce(in, out, count, dtype, op, root, comm, stream));
  }
  NcclResult broadcast(const void* in, void* out, size_t count, int dtype, int root, NcclHandle comm, Stream stream)
      override {
    return asResult(f_.ncclBroadcast(in, out, count, dtype, root, comm, stream));
  }
  NcclResult allGather(const void* in, void* out, size_t count, int dtype, NcclHandle comm, Stream stream) override {
    return asResult(f_.ncclAllGather(in, out, count, dtype, comm, stream));
  }
  NcclResult reduceScatter(const void* in, void* out, size_t count, int dtype, int op, NcclHandle comm, Stream stream)
      override {
    return asResult(f_.ncclReduceScatter(in, out, count, dtype, op, comm, stream));
  }
  NcclResult send(const void* in, size_t count, int dtype, int peer, NcclHandle comm, Stream stream) override {
    return asResult(f_.ncclSend(in, count, dtype, peer, comm, stream));
  }
  NcclResult recv(void* out, size_t count, int dtype, int peer, NcclHandle comm, Stream stream) override {
    return asResult(f_.ncclRecv(out, count, dtype, peer, comm, stream));
  }

 private:
  const Functions f_; ///< of a library that is never unloaded: its threads may outlive every communicator
  const std::string origin_;
};

std::string versionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
      std::to_string(version % 100);
}

/// NCCL out of an open library, or null and the reason added to `told`.
std::unique_ptr<NcclApi> take(void* library, const std::string& name, std::string& told) {
  Functions functions;
  if (const std::string missing = findAll(library, functions); !missing.empty()) {
    told += " " + name + " lacks " + missing + ".";
    return nullptr;
  }
  int version = 0;
  if (functions.ncclGetVersion(&version) != 0 || version < kNcclOldest) {
    told += " " + name + " is version " + versionText(version) + ", older than " + versionText(kNcclOldest) + ".";
    return nullptr;
  }
  return std::make_unique<LoadedNccl>(functions, name + ", version " + versionText(version));
}

} // namespace

std::unique_ptr<NcclApi> loadNccl(const std::vector<std::string>& paths) {
  constexpr const char* kName = "libnccl.so.2";
  std::string told;
  // torch links its own NCCL: two of them in one process would share neither memory nor environment cleanly.
  if (void* const there = ::dlopen(kName, RTLD_NOW | RTLD_NOLOAD); there != nullptr) {
    if (auto api = take(there, std::string(kName) + " of this process", told)) {
      return api;
    }
  }
  std::vector<std::string> candidates = paths;
  candidates.emplace_back(kName);
  for (const std::string& candidate : candidates) {
    void* const library = ::dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* const why = ::dlerror();
      told += std::string(" ") + (why == nullptr ? candidate + " could not be opened" : why) + ".";
      continue;
    }
    if (auto api = take(library, candidate, told)) {
      return api;
    }
  }
  throw Error(
      ErrorCode::Unsupported,
      "NCCL could not be loaded." + told,
      "pip install nvidia-nccl-cu13 (or -cu12, as torch's CUDA), or cuda_mode=\"host\", which needs no NCCL");
}

} // namespace pycomm::cuda
