// NCCL's functions on the fake device, for ranks that are processes of one host: a message is a file in a folder that the unique
// id names. As strict as NCCL may be:
//
// - Launches of one communicator meet by their number: the third of one rank meets the third of the others. If they are not the same
//   collective, with the same count, dtype, op and root, all of them hang, and stderr says so. An abort ends what hangs.
// - A group is on its stream only when ncclCommGetAsyncError has said so, some looks later.
// - Buffers are the device's memory. A communicator that was aborted or destroyed is not used again.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fake_cudart/device.h"

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidArgument = 4;
constexpr int kInProgress = 7;
constexpr size_t kElement[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

std::atomic<int> reported{kSuccess};
std::atomic<bool> launches_held{false};
std::atomic<bool> looks_held{false};
std::atomic<bool> look_waits{false};
std::string groups; // what was issued, a group after the other: "3 1 "

struct UniqueId {
  char folder[128];
};

/// A file that another rank has written, or will.
struct Wanted {
  std::string name;
  size_t nbytes;
};

struct Comm {
  int rank = 0;
  int size = 1;
  std::string folder;
  std::atomic<bool> aborted{false};
  std::mutex mutex; // guards the rest
  long launches = 0;
  std::vector<long> sent; // messages, by peer
  std::vector<long> received;
  std::function<void()> begun; // puts the last group onto its stream
  int looks_left = 0; // until that

  void write(const std::string& name, const void* bytes, size_t nbytes) const {
    FILE* file = std::fopen((name + "w").c_str(), "wb");
    std::fwrite(bytes, 1, nbytes, file);
    std::fclose(file);
    std::rename((name + "w").c_str(), name.c_str());
  }
  static bool read(const std::string& name, std::vector<char>& bytes) {
    FILE* file = std::fopen(name.c_str(), "rb");
    if (file == nullptr) {
      return false;
    }
    bytes.clear();
    char block[65536];
    for (size_t got; (got = std::fread(block, 1, sizeof(block), file)) > 0;) {
      bytes.insert(bytes.end(), block, block + got);
    }
    std::fclose(file);
    return true;
  }
  std::string path(int from, int to, const std::string& what) const {
    return folder + "/" + std::to_string(from) + "-" + std::to_string(to) + "-" + what;
  }
  std::string card(int of, long launch) const {
    return folder + "/launch" + std::to_string(launch) + "-" + std::to_string(of);
  }
};

using Arrived = std::vector<std::vector<char>>; // by rank

/// One call of a group. Nobody waits in `give`; `take` is called when all that is wanted has arrived.
struct Call {
  Comm* comm;
  cudaStream_t stream;
  std::string collective; // what must be the same on all ranks; empty for a message
  std::vector<Wanted> wanted; // by rank; empty names: nothing
  std::function<void()> give;
  std::function<void(const Arrived&)> take;
};
thread_local std::vector<Call> grouped;
thread_local int depth = 0;

[[noreturn]] void misuse(const char* what) {
  std::fprintf(stderr, "fake NCCL: %s\n", what);
  std::abort();
}

/// A group's kernel: what its stream comes to.
struct Kernel {
  std::vector<Call> calls;
  std::string card;
  long launch = 0;
  bool given = false;
  bool agreed = false;
  bool hangs = false;

  bool hang(const std::string& why) {
    if (!hangs) {
      std::fprintf(stderr, "fake NCCL: rank %d hangs: %s\n", calls.front().comm->rank, why.c_str());
    }
    hangs = true;
    return false;
  }
  bool run() {
    Comm& comm = *calls.front().comm;
    if (comm.aborted) {
      return true;
    }
    if (hangs) {
      return false;
    }
    if (!std::exchange(given, true)) {
      if (!card.empty()) {
        comm.write(comm.card(comm.rank, launch), card.data(), card.size());
      }
      for (const Call& each : calls) {
        each.give();
      }
    }
    std::vector<char> bytes;
    for (int peer = 0; peer < comm.size && !card.empty() && !agreed; ++peer) {
      if (!Comm::read(comm.card(peer, launch), bytes)) {
        return false;
      }
      const std::string theirs(bytes.begin(), bytes.end());
      if (theirs != card) {
        return hang(
            "its launch " + std::to_string(launch) + " is " + card + ", and rank " + std::to_string(peer) + "'s is " +
            theirs);
      }
    }
    agreed = true;
    for (const Call& each : calls) {
      for (const Wanted& wanted : each.wanted) {
        if (!wanted.name.empty() && access(wanted.name.c_str(), F_OK) != 0) {
          return false;
        }
      }
    }
    for (const Call& each : calls) {
      Arrived arrived(each.wanted.size());
      for (size_t peer = 0; peer < each.wanted.size(); ++peer) {
        const Wanted& wanted = each.wanted[peer];
        if (wanted.name.empty()) {
          continue;
        }
        Comm::read(wanted.name, arrived[peer]);
        if (arrived[peer].size() != wanted.nbytes) {
          return hang("a message of another size came from rank " + std::to_string(peer));
        }
      }
      each.take(arrived);
    }
    for (const Call& each : calls) {
      for (const Wanted& wanted : each.wanted) {
        if (!wanted.name.empty()) {
          std::remove(wanted.name.c_str());
        }
      }
    }
    return true;
  }
};

int issue(Call call) {
  if (call.comm->aborted) {
    misuse("a communicator was used after its end");
  }
  grouped.push_back(std::move(call));
  if (depth > 0) {
    return kSuccess;
  }
  groups += std::to_string(grouped.size()) + " ";
  auto kernel = std::make_shared<Kernel>();
  kernel->calls = std::move(grouped);
  grouped.clear();
  Comm& comm = *kernel->calls.front().comm;
  cudaStream_t const stream = kernel->calls.front().stream;
  for (const Call& each : kernel->calls) {
    kernel->card += each.collective;
  }
  const std::lock_guard<std::mutex> lock(comm.mutex);
  if (comm.begun) {
    misuse("a group was begun before ncclCommGetAsyncError said that the last one had been");
  }
  kernel->launch = comm.launches++;
  comm.begun = [kernel, stream] { fake_cuda::put(stream, [kernel](bool broken) { return broken || kernel->run(); }); };
  comm.looks_left = static_cast<int>(fake_cuda::draw(3));
  return kInProgress;
}

template <class T>
void foldAs(std::vector<char>& sum, const char* other, size_t count, int op) {
  for (size_t i = 0; i < count; ++i) {
    T a;
    T b;
    std::memcpy(&a, sum.data() + i * sizeof(T), sizeof(T));
    std::memcpy(&b, other + i * sizeof(T), sizeof(T));
    a = op == 2 ? std::max(a, b) : static_cast<T>(a + b);
    std::memcpy(sum.data() + i * sizeof(T), &a, sizeof(T));
  }
}

void fold(std::vector<char>& sum, const char* other, size_t count, int dtype, int op) {
  switch (dtype) {
    case 6:
      return foldAs<c10::Half>(sum, other, count, op);
    case 9:
      return foldAs<c10::BFloat16>(sum, other, count, op);
    case 7:
      return foldAs<float>(sum, other, count, op);
    case 4:
      return foldAs<int64_t>(sum, other, count, op);
  }
  std::fprintf(stderr, "the fake NCCL adds no elements of type %d\n", dtype);
  std::exit(3);
}

/// All ranks' `count` elements that are for this rank, in rank order; `own` is this one's.
std::vector<char> folded(const Comm* comm, const Arrived& arrived, const char* own, size_t count, int dtype, int op) {
  const size_t nbytes = count * kElement[dtype];
  std::vector<char> sum;
  for (int peer = 0; peer < comm->size; ++peer) {
    const std::vector<char> theirs = peer == comm->rank ? std::vector<char>(own, own + nbytes) : arrived[peer];
    if (sum.empty()) {
      sum = theirs;
    } else {
      fold(sum, theirs.data(), count, dtype, op);
    }
  }
  if (op == 4) {
    for (size_t i = 0; i < count; ++i) {
      float value;
      std::memcpy(&value, sum.data() + 4 * i, 4);
      value /= static_cast<float>(comm->size);
      std::memcpy(sum.data() + 4 * i, &value, 4);
    }
  }
  return sum;
}

/// Where kernels find `count` elements; `ok` is false from then on if that is not memory of the device.
char* bytesOf(const void* ptr, size_t nbytes, bool& ok) {
  char* const bytes = fake_cuda::kernelBytes(ptr, nbytes);
  ok = ok && bytes != nullptr;
  return bytes;
}

/// A collective of which rank r gives `given(r)` to rank r, null: nothing, and takes what `takers` wants.
int collective(
    Comm* comm,
    cudaStream_t stream,
    const std::string& what,
    std::function<const char*(int)> given,
    const std::function<bool(int)>& wants,
    size_t nbytes,
    std::function<void(const Arrived&)> take) {
  Call call;
  call.comm = comm;
  call.stream = stream;
  call.collective = what + " ";
  {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    // Calls of one group have one number, and places in it.
    const std::string number = "c" + std::to_string(comm->launches) + "." + std::to_string(grouped.size());
    call.wanted.resize(comm->size);
    for (int peer = 0; peer < comm->size; ++peer) {
      if (peer != comm->rank && wants(peer) && nbytes > 0) {
        call.wanted[peer] = {comm->path(peer, comm->rank, number), nbytes};
      }
    }
    call.give = [=] {
      for (int peer = 0; peer < comm->size; ++peer) {
        if (const char* const bytes = peer == comm->rank || nbytes == 0 ? nullptr : given(peer)) {
          comm->write(comm->path(comm->rank, peer, number), bytes, nbytes);
        }
      }
    };
  }
  call.take = std::move(take);
  return issue(std::move(call));
}

std::string about(const char* name, size_t count, int dtype, int op, int root) {
  return std::string(name) + "(" + std::to_string(count) + " of type " + std::to_string(dtype) + ", op " +
      std::to_string(op) + ", root " + std::to_string(root) + ")";
}

} // namespace

extern "C" {
#define FAKE_EXPORT __attribute__((visibility("default")))

/// From here on the communicators of this process report that ncclResult_t; 0: none.
FAKE_EXPORT void fake_nccl_report(int result) {
  reported = result;
}

/// The sizes of the groups that the calling thread's process has issued, as "3 1 "; one call alone is a group of one.
FAKE_EXPORT const char* fake_nccl_groups(void) {
  return groups.c_str();
}

FAKE_EXPORT int ncclGetVersion(int* version) {
  *version = 22707;
  return kSuccess;
}
FAKE_EXPORT int ncclGetUniqueId(UniqueId* id) {
  // Beside this library, which lies where a test's files do, and goes with them.
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&ncclGetUniqueId), &info);
  const std::string library = info.dli_fname;
  std::snprintf(id->folder, sizeof(id->folder), "%s/nccl-XXXXXX", library.substr(0, library.rfind('/')).c_str());
  return mkdtemp(id->folder) != nullptr ? kSuccess : 2;
}
FAKE_EXPORT int ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, void*) {
  *comm = new Comm;
  (*comm)->rank = rank;
  (*comm)->size = size;
  (*comm)->folder = id.folder;
  (*comm)->sent.resize(size);
  (*comm)->received.resize(size);
  if (FILE* file = std::fopen(((*comm)->folder + "/here" + std::to_string(rank)).c_str(), "wb")) {
    std::fclose(file);
  }
  return kInProgress;
}
FAKE_EXPORT int ncclCommGetAsyncError(Comm* comm, int* state) {
  if (comm->aborted) {
    misuse("a communicator was asked after its end");
  }
  *state = reported;
  for (int peer = 0; peer < comm->size && *state == kSuccess; ++peer) {
    if (access((comm->folder + "/here" + std::to_string(peer)).c_str(), F_OK) != 0) {
      *state = kInProgress;
    }
  }
  while (*state == kSuccess && looks_held) {
    look_waits = true;
    usleep(1000);
  }
  const std::lock_guard<std::mutex> lock(comm->mutex);
  if (comm->begun && *state == kSuccess) {
    if (launches_held || comm->looks_left-- > 0) {
      *state = kInProgress;
    } else {
      std::exchange(comm->begun, nullptr)();
    }
  }
  return kSuccess;
}
/// 1: no group gets onto its stream from here on, as if NCCL still connected to other ranks for it.
FAKE_EXPORT void fake_nccl_hold_launches(int hold) {
  launches_held = hold != 0;
}
/// 1: ncclCommGetAsyncError does not return where it would say that all is well, until 0.
FAKE_EXPORT void fake_nccl_hold_looks(int hold) {
  looks_held = hold != 0;
}
/// Whether it was ever held up so.
FAKE_EXPORT int fake_nccl_look_waits(void) {
  return look_waits ? 1 : 0;
}
FAKE_EXPORT int ncclCommAbort(Comm* comm) {
  if (comm->aborted.exchange(true)) { // not freed: what is on the stream still looks at it
    misuse("a communicator was ended twice");
  }
  return kSuccess;
}
FAKE_EXPORT int ncclCommDestroy(Comm* comm) {
  return ncclCommAbort(comm);
}
FAKE_EXPORT const char* ncclGetLastError(Comm*) {
  return "the test asked for it";
}
FAKE_EXPORT int ncclGroupStart() {
  ++depth;
  return kSuccess;
}
FAKE_EXPORT int ncclGroupEnd() {
  if (--depth > 0 || grouped.empty()) {
    return kSuccess;
  }
  Call last = std::move(grouped.back());
  grouped.pop_back();
  return issue(std::move(last));
}
FAKE_EXPORT int ncclSend(const void* in, size_t count, int dtype, int peer, Comm* comm, void* stream) {
  const size_t nbytes = count * kElement[dtype];
  bool ok = true;
  const char* const from = bytesOf(in, nbytes, ok);
  if (!ok) {
    return kInvalidArgument;
  }
  Call call;
  call.comm = comm;
  call.stream = static_cast<cudaStream_t>(stream);
  const std::lock_guard<std::mutex> lock(comm->mutex);
  call.give = [=, name = comm->path(comm->rank, peer, "m" + std::to_string(comm->sent[peer]++))] {
    comm->write(name, from, nbytes);
  };
  call.take = [](const Arrived&) {};
  if (depth == 0) {
    misuse("a message outside of a group");
  }
  grouped.push_back(std::move(call));
  return kSuccess;
}
FAKE_EXPORT int ncclRecv(void* out, size_t count, int dtype, int peer, Comm* comm, void* stream) {
  const size_t nbytes = count * kElement[dtype];
  bool ok = true;
  char* const into = bytesOf(out, nbytes, ok);
  if (!ok) {
    return kInvalidArgument;
  }
  Call call;
  call.comm = comm;
  call.stream = static_cast<cudaStream_t>(stream);
  const std::lock_guard<std::mutex> lock(comm->mutex);
  call.give = [] {};
  call.wanted.resize(comm->size);
  call.wanted[peer] = {comm->path(peer, comm->rank, "m" + std::to_string(comm->received[peer]++)), nbytes};
  call.take = [=](const Arrived& arrived) { std::memcpy(into, arrived[peer].data(), nbytes); };
  if (depth == 0) {
    misuse("a message outside of a group");
  }
  grouped.push_back(std::move(call));
  return kSuccess;
}
FAKE_EXPORT int ncclReduce(
    const void* in,
    void* out,
    size_t count,
    int dtype,
    int op,
    int root,
    Comm* comm,
    void* stream) {
  const size_t nbytes = count * kElement[dtype];
  const bool takes = root < 0 || comm->rank == root;
  bool ok = true;
  const char* const from = bytesOf(in, nbytes, ok);
  char* const into = takes ? bytesOf(out, nbytes, ok) : nullptr;
  if (!ok) {
    return kInvalidArgument;
  }
  return collective(
      comm,
      static_cast<cudaStream_t>(stream),
      about(root < 0 ? "all_reduce" : "reduce", count, dtype, op, root),
      [=](int peer) { return root < 0 || peer == root ? from : nullptr; },
      [=](int) { return takes; },
      nbytes,
      [=](const Arrived& arrived) {
        if (takes) {
          const std::vector<char> sum = folded(comm, arrived, from, count, dtype, op);
          std::memcpy(into, sum.data(), nbytes);
        }
      });
}
FAKE_EXPORT int ncclAllReduce(const void* in, void* out, size_t count, int dtype, int op, Comm* comm, void* stream) {
  return ncclReduce(in, out, count, dtype, op, -1, comm, stream);
}
FAKE_EXPORT int ncclBroadcast(const void* in, void* out, size_t count, int dtype, int root, Comm* comm, void* stream) {
  const size_t nbytes = count * kElement[dtype];
  const bool gives = comm->rank == root;
  bool ok = true;
  const char* const from = gives ? bytesOf(in, nbytes, ok) : nullptr;
  char* const into = bytesOf(out, nbytes, ok);
  if (!ok) {
    return kInvalidArgument;
  }
  return collective(
      comm,
      static_cast<cudaStream_t>(stream),
      about("broadcast", count, dtype, 0, root),
      [=](int) { return from; },
      [=](int peer) { return peer == root; },
      nbytes,
      [=](const Arrived& arrived) { std::memmove(into, gives ? from : arrived[root].data(), nbytes); });
}
FAKE_EXPORT int ncclAllGather(const void* in, void* out, size_t count, int dtype, Comm* comm, void* stream) {
  const size_t nbytes = count * kElement[dtype];
  bool ok = true;
  const char* const from = bytesOf(in, nbytes, ok);
  char* const into = bytesOf(out, nbytes * comm->size, ok);
  if (!ok) {
    return kInvalidArgument;
  }
  return collective(
      comm,
      static_cast<cudaStream_t>(stream),
      about("all_gather", count, dtype, 0, 0),
      [=](int) { return from; },
      [](int) { return true; },
      nbytes,
      [=](const Arrived& arrived) {
        for (int peer = 0; peer < comm->size; ++peer) {
          std::memmove(into + nbytes * peer, peer == comm->rank ? from : arrived[peer].data(), nbytes);
        }
      });
}
FAKE_EXPORT int ncclReduceScatter(
    const void* in,
    void* out,
    size_t count,
    int dtype,
    int op,
    Comm* comm,
    void* stream) {
  const size_t nbytes = count * kElement[dtype];
  bool ok = true;
  const char* const from = bytesOf(in, nbytes * comm->size, ok);
  char* const into = bytesOf(out, nbytes, ok);
  if (!ok) {
    return kInvalidArgument;
  }
  return collective(
      comm,
      static_cast<cudaStream_t>(stream),
      about("reduce_scatter", count, dtype, op, 0),
      [=](int peer) { return from + nbytes * peer; },
      [](int) { return true; },
      nbytes,
      [=](const Arrived& arrived) {
        const std::vector<char> sum = folded(comm, arrived, from + nbytes * comm->rank, count, dtype, op);
        std::memcpy(into, sum.data(), nbytes);
      });
}
}
