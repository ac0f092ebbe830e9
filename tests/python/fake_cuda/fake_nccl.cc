// NCCL's functions on the fake device, for ranks that are processes of one host: a message is a file in a folder that the unique
// id names. Calls are put onto their stream and run in its order, as NCCL's kernels do; an abort ends those that wait for a peer.
#include <c10/util/Half.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

/// Of fake_cuda.cc: runs a task when the stream has done all that was put onto it before.
void putOnFakeStream(void* stream, std::function<void()> task);

namespace {

constexpr int kSuccess = 0;
constexpr int kInProgress = 7;
constexpr size_t kElement[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

std::atomic<int> reported{kSuccess};
std::string groups; // what was issued, a group after the other: "3 1 "

struct UniqueId {
  char folder[128];
};

struct Comm {
  int rank = 0;
  int size = 1;
  std::string folder;
  std::atomic<bool> aborted{false};
  std::vector<long> sent;
  std::vector<long> received;

  std::string path(int from, int to, long number) const {
    return folder + "/" + std::to_string(from) + "-" + std::to_string(to) + "-" + std::to_string(number);
  }
  void send(int to, const void* bytes, size_t nbytes) {
    const std::string name = path(rank, to, sent[to]++);
    FILE* file = std::fopen((name + "w").c_str(), "wb");
    std::fwrite(bytes, 1, nbytes, file);
    std::fclose(file);
    std::rename((name + "w").c_str(), name.c_str());
  }
  std::vector<char> receive(int from, size_t nbytes) {
    const std::string name = path(from, rank, received[from]++);
    std::vector<char> bytes(nbytes);
    while (!aborted) {
      if (FILE* file = std::fopen(name.c_str(), "rb")) {
        if (std::fread(bytes.data(), 1, nbytes, file) != nbytes) {
          reported = 3;
        }
        std::fclose(file);
        std::remove(name.c_str());
        break;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return bytes;
  }
};

/// A call in two halves: nobody waits in the first.
struct Call {
  void* stream;
  std::function<void()> give;
  std::function<void()> take;
};
thread_local std::vector<Call> grouped;
thread_local int depth = 0;

int issue(Call call) {
  grouped.push_back(std::move(call));
  if (depth > 0) {
    return kSuccess;
  }
  groups += std::to_string(grouped.size()) + " ";
  auto calls = std::make_shared<std::vector<Call>>(std::move(grouped));
  grouped.clear();
  putOnFakeStream(calls->front().stream, [calls] {
    for (const Call& each : *calls) {
      each.give();
    }
    for (const Call& each : *calls) {
      each.take();
    }
  });
  return kSuccess;
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
    case 7:
      return foldAs<float>(sum, other, count, op);
    case 4:
      return foldAs<int64_t>(sum, other, count, op);
  }
  std::fprintf(stderr, "the fake NCCL adds no elements of type %d\n", dtype);
  std::exit(3);
}

/// All ranks' `count` elements that are for this rank, in rank order; `own` is this one's.
std::vector<char> folded(Comm* comm, const std::vector<char>& own, size_t count, int dtype, int op) {
  std::vector<char> sum;
  for (int peer = 0; peer < comm->size; ++peer) {
    const std::vector<char> theirs = peer == comm->rank ? own : comm->receive(peer, own.size());
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
  const char* const base = std::getenv("TMPDIR");
  std::snprintf(id->folder, sizeof(id->folder), "%s/fake-nccl-XXXXXX", base != nullptr ? base : "/tmp");
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
  *state = reported;
  for (int peer = 0; peer < comm->size && *state == kSuccess; ++peer) {
    if (access((comm->folder + "/here" + std::to_string(peer)).c_str(), F_OK) != 0) {
      *state = kInProgress;
    }
  }
  return kSuccess;
}
FAKE_EXPORT int ncclCommAbort(Comm* comm) {
  comm->aborted = true; // not freed: what is on the stream still looks at it
  return kSuccess;
}
FAKE_EXPORT int ncclCommDestroy(Comm* comm) {
  return ncclCommAbort(comm);
}
FAKE_EXPORT const char* ncclGetLastError(Comm*) {
  return "the fake was told to";
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
  return issue({stream, [=] { comm->send(peer, in, count * kElement[dtype]); }, [] {}});
}
FAKE_EXPORT int ncclRecv(void* out, size_t count, int dtype, int peer, Comm* comm, void* stream) {
  return issue({stream, [] {}, [=] {
                  const std::vector<char> bytes = comm->receive(peer, count * kElement[dtype]);
                  std::memcpy(out, bytes.data(), bytes.size());
                }});
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
  const bool all = root < 0;
  const auto give = [=] {
    for (int peer = 0; peer < comm->size; ++peer) {
      if (peer != comm->rank && (all || peer == root)) {
        comm->send(peer, in, nbytes);
      }
    }
  };
  const auto take = [=] {
    if (all || comm->rank == root) {
      const auto* const own = static_cast<const char*>(in);
      const std::vector<char> sum = folded(comm, {own, own + nbytes}, count, dtype, op);
      std::memcpy(out, sum.data(), nbytes);
    }
  };
  return issue({stream, give, take});
}
FAKE_EXPORT int ncclAllReduce(const void* in, void* out, size_t count, int dtype, int op, Comm* comm, void* stream) {
  return ncclReduce(in, out, count, dtype, op, -1, comm, stream);
}
FAKE_EXPORT int ncclBroadcast(
    const void* in,
    void* out,
    size_t count,
    int dtype,
    int root,
    Comm* comm,
    void* stream) {
  const size_t nbytes = count * kElement[dtype];
  const auto give = [=] {
    for (int peer = 0; peer < comm->size && comm->rank == root; ++peer) {
      if (peer != root) {
        comm->send(peer, in, nbytes);
      }
    }
  };
  const auto take = [=] {
    if (comm->rank != root) {
      std::memcpy(out, comm->receive(root, nbytes).data(), nbytes);
    } else if (out != in) {
      std::memmove(out, in, nbytes);
    }
  };
  return issue({stream, give, take});
}
FAKE_EXPORT int ncclAllGather(const void* in, void* out, size_t count, int dtype, Comm* comm, void* stream) {
  const size_t nbytes = count * kElement[dtype];
  const auto give = [=] {
    for (int peer = 0; peer < comm->size; ++peer) {
      if (peer != comm->rank) {
        comm->send(peer, in, nbytes);
      }
    }
  };
  const auto take = [=] {
    for (int peer = 0; peer < comm->size; ++peer) {
      char* const place = static_cast<char*>(out) + nbytes * peer;
      if (peer == comm->rank) {
        std::memmove(place, in, nbytes);
      } else {
        std::memcpy(place, comm->receive(peer, nbytes).data(), nbytes);
      }
    }
  };
  return issue({stream, give, take});
}
FAKE_EXPORT int ncclReduceScatter(const void* in, void* out, size_t count, int dtype, int op, Comm* comm, void* stream) {
  const size_t nbytes = count * kElement[dtype];
  const auto part = [=](int peer) { return static_cast<const char*>(in) + nbytes * peer; };
  const auto give = [=] {
    for (int peer = 0; peer < comm->size; ++peer) {
      if (peer != comm->rank) {
        comm->send(peer, part(peer), nbytes);
      }
    }
  };
  const auto take = [=] {
    const char* const own = part(comm->rank);
    const std::vector<char> sum = folded(comm, {own, own + nbytes}, count, dtype, op);
    std::memcpy(out, sum.data(), nbytes);
  };
  return issue({stream, give, take});
}
}
