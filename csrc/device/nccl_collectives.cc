#include "device/nccl_collectives.h"

#include <numeric>
#include <string>
#include <utility>

namespace pycomm::cuda {
namespace {

const std::byte* at(const void* base, uint64_t numel, size_t element) {
  return static_cast<const std::byte*>(base) + numel * element;
}

std::byte* at(void* base, uint64_t numel, size_t element) {
  return static_cast<std::byte*>(base) + numel * element;
}

/// Where part `part` of `size` begins: parts differ by one element at most. The products fit: an address has 47 bits,
/// and more ranks than 2^16 do not exist.
uint64_t partBegin(uint64_t numel, int part, int size) {
  return numel * static_cast<uint64_t>(part) / static_cast<uint64_t>(size);
}

uint64_t partNumel(uint64_t numel, int part, int size) {
  return partBegin(numel, part + 1, size) - partBegin(numel, part, size);
}

bool reduces(Collective kind) {
  return kind == Collective::AllReduce || kind == Collective::Reduce || kind == Collective::ReduceScatter;
}

} // namespace

NcclCollectives::NcclCollectives(NcclRank rank) : rank_(std::move(rank)) {}

NcclCollectives::~NcclCollectives() {
  if (scratch_ != nullptr) {
    rank_.runtime.freeDevice(scratch_);
  }
}

void NcclCollectives::validate(const NcclCall& call) const {
  const auto refuse = [&](const std::string& why) {
    ErrorRecord record = rank_.about(call);
    record.code = ErrorCode::InvalidArgument;
    record.summary = std::string(call.name) + ": " + why;
    throw Error(record);
  };
  if (reduces(call.kind)) {
    static_cast<void>(ncclReduction(call.dtype, call.op)); // throws where NCCL has none
  }
  const bool direct = call.algorithm == Algorithm::Direct;
  if (call.kind == Collective::AllReduce && (direct || call.algorithm == Algorithm::Ring)) {
    checkReduce(rank_.runtime, call.dtype, call.op, direct ? static_cast<size_t>(rank_.size) : 2);
  }
  const bool named = call.kind == Collective::Reduce || call.kind == Collective::Broadcast;
  if (named && (call.peer < 0 || call.peer >= rank_.size)) {
    refuse("rank " + std::to_string(call.peer) + " is not in a group of " + std::to_string(rank_.size) + ".");
  }
  if (call.kind == Collective::AllToAll &&
      (call.send_counts.size() != static_cast<size_t>(rank_.size) ||
       call.recv_counts.size() != static_cast<size_t>(rank_.size))) {
    refuse("a count for each rank is needed.");
  }
}

void NcclCollectives::enqueue(const std::vector<NcclCall>& calls, const InGroup& in_group) {
  std::vector<NcclCall> together;
  for (const NcclCall& call : calls) {
    if (call.kind == Collective::AllReduce && call.algorithm == Algorithm::Ring) {
      ring(call, in_group);
    } else if (call.kind == Collective::AllReduce && call.algorithm == Algorithm::Direct) {
      direct(call, in_group);
    } else {
      together.push_back(call);
    }
  }
  if (together.empty()) {
    return;
  }
  for (const NcclCall& call : together) {
    copyOwnPart(call);
  }
  in_group([&](NcclHandle comm) {
    for (const NcclCall& call : together) {
      move(call, comm);
    }
  });
}

void NcclCollectives::move(const NcclCall& call, NcclHandle comm) const {
  const size_t element = elementSize(call.dtype);
  const size_t nbytes = call.numel * element;
  Stream const stream = rank_.stream;
  NcclReduction how;
  if (reduces(call.kind)) {
    how = ncclReduction(call.dtype, call.op);
  }
  const size_t count = call.numel * how.count_per_element;
  NcclApi& api = rank_.api;
  const auto check = [&](NcclResult result, const char* name) { rank_.check(result, name, comm); };
  switch (call.kind) {
    case Collective::AllReduce:
      return check(api.allReduce(call.input, call.output, count, how.dtype, how.op, comm, stream), "ncclAllReduce");
    case Collective::Reduce:
      return check(
          api.reduce(call.input, call.output, count, how.dtype, how.op, call.peer, comm, stream), "ncclReduce");
    case Collective::ReduceScatter:
      return check(
          api.reduceScatter(call.input, call.output, count, how.dtype, how.op, comm, stream), "ncclReduceScatter");
    case Collective::Broadcast:
      return check(
          api.broadcast(call.input, call.output, nbytes, kNcclBytes, call.peer, comm, stream), "ncclBroadcast");
    case Collective::AllGather:
      return check(api.allGather(call.input, call.output, nbytes, kNcclBytes, comm, stream), "ncclAllGather");
    case Collective::AllToAll:
      return allToAll(call, comm);
    case Collective::Barrier:
    case Collective::Gather:
    case Collective::Scatter:
    case Collective::Send:
    case Collective::Recv:
      break;
  }
  throw Error(ErrorCode::Internal, std::string(call.name) + " is none of those that NCCL runs.");
}

// Of an all_to_all, what stays here. Before NCCL's group begins: a copy may wait for room on the stream, and what could make
// some, an abort, waits for the calls of the group.
void NcclCollectives::copyOwnPart(const NcclCall& call) const {
  if (call.kind != Collective::AllToAll) {
    return;
  }
  const auto before = [&](const std::vector<uint64_t>& counts) {
    return std::accumulate(counts.begin(), counts.begin() + rank_.rank, uint64_t{0});
  };
  const size_t element = elementSize(call.dtype);
  rank_.runtime.copy(
      at(call.output, before(call.recv_counts), element),
      at(call.input, before(call.send_counts), element),
      call.send_counts[static_cast<size_t>(rank_.rank)] * element,
      rank_.stream);
}

void NcclCollectives::send(const void* from, size_t nbytes, int peer, NcclHandle comm) const {
  if (nbytes > 0) {
    rank_.check(rank_.api.send(from, nbytes, kNcclBytes, peer, comm, rank_.stream), "ncclSend", comm);
  }
}

void NcclCollectives::recv(void* into, size_t nbytes, int peer, NcclHandle comm) const {
  if (nbytes > 0) {
    rank_.check(rank_.api.recv(into, nbytes, kNcclBytes, peer, comm, rank_.stream), "ncclRecv", comm);
  }
}

void NcclCollectives::allToAll(const NcclCall& call, NcclHandle comm) const {
  const size_t element = elementSize(call.dtype);
  uint64_t sent = 0;
  uint64_t received = 0;
  for (int peer = 0; peer < rank_.size; ++peer) {
    const uint64_t out = call.send_counts[static_cast<size_t>(peer)];
    const uint64_t in = call.recv_counts[static_cast<size_t>(peer)];
    if (peer != rank_.rank) {
      send(at(call.input, sent, element), out * element, peer, comm);
      recv(at(call.output, received, element), in * element, peer, comm);
    }
    sent += out;
    received += in;
  }
}

void* NcclCollectives::scratch(size_t nbytes) {
  if (nbytes > scratch_nbytes_) {
    if (scratch_ != nullptr) {
      // Kernels before may still use the old one; cudaFree waits for them.
      rank_.runtime.freeDevice(scratch_);
      scratch_ = nullptr;
      scratch_nbytes_ = 0;
    }
    scratch_ = rank_.runtime.allocateDevice(nbytes);
    scratch_nbytes_ = nbytes;
  }
  return scratch_;
}

// A ring of N ranks, N parts. In step s of the first phase rank r sends part r-s and adds what it receives to part
// r-s-1; then part r+1 is complete on rank r, and goes round once more. N = 3, rank 0's view:
//
//     step          sends        receives
//     reduce 0      part 0       part 2, adds
//     reduce 1      part 2       part 1, adds: complete
//     gather 0      part 1       part 0
//     gather 1      part 0       part 2
void NcclCollectives::ring(const NcclCall& call, const InGroup& in_group) {
  const int n = rank_.size;
  const size_t element = elementSize(call.dtype);
  if (call.input != call.output) {
    rank_.runtime.copy(call.output, call.input, call.numel * element, rank_.stream);
  }
  const auto part = [&](int index) { return ((index % n) + n) % n; };
  const int next = part(rank_.rank + 1);
  const int previous = part(rank_.rank - 1);
  const auto exchange = [&](int sent, int received, void* into) {
    const uint64_t out = partNumel(call.numel, sent, n) * element;
    const uint64_t in = partNumel(call.numel, received, n) * element;
    in_group([&](NcclHandle comm) {
      send(at(call.output, partBegin(call.numel, sent, n), element), out, next, comm);
      recv(into, in, previous, comm);
    });
  };
  void* const arrived = scratch((call.numel / static_cast<uint64_t>(n) + 1) * element);
  for (int step = 0; step < n - 1; ++step) {
    const int received = part(rank_.rank - step - 1);
    exchange(part(rank_.rank - step), received, arrived);
    void* const own = at(call.output, partBegin(call.numel, received, n), element);
    const void* const sources[] = {arrived, own};
    const bool last = step == n - 2;
    reduceInto(
        rank_.runtime,
        call.dtype,
        call.op == ReduceOp::Avg && !last ? ReduceOp::Sum : call.op,
        own,
        sources,
        2,
        partNumel(call.numel, received, n),
        static_cast<uint32_t>(n),
        rank_.stream);
  }
  for (int step = 0; step < n - 1; ++step) {
    const int received = part(rank_.rank - step);
    exchange(part(rank_.rank + 1 - step), received, at(call.output, partBegin(call.numel, received, n), element));
  }
}

// Everyone sends every other rank that one's part, adds all N of its own part in rank order in one fp32 accumulator,
// and sends the result to all.
void NcclCollectives::direct(const NcclCall& call, const InGroup& in_group) {
  const int n = rank_.size;
  const size_t element = elementSize(call.dtype);
  const uint64_t own_begin = partBegin(call.numel, rank_.rank, n);
  const uint64_t own_numel = partNumel(call.numel, rank_.rank, n);
  // Each rank's part at a multiple of 16 bytes, so that the kernel's vectors fit.
  const size_t stride = (own_numel * element + 15) / 16 * 16;
  std::byte* const arrived = static_cast<std::byte*>(scratch(stride * static_cast<size_t>(n) + 16));
  std::vector<const void*> sources;
  for (int peer = 0; peer < n; ++peer) {
    sources.push_back(
        peer == rank_.rank ? at(call.input, own_begin, element) : arrived + stride * static_cast<size_t>(peer));
  }
  const auto others = [&](const auto& with) {
    in_group([&](NcclHandle comm) {
      for (int peer = 0; peer < n; ++peer) {
        if (peer != rank_.rank) {
          with(comm, peer, partBegin(call.numel, peer, n), partNumel(call.numel, peer, n) * element);
        }
      }
    });
  };
  others([&](NcclHandle comm, int peer, uint64_t begin, uint64_t nbytes) {
    send(at(call.input, begin, element), nbytes, peer, comm);
    recv(arrived + stride * static_cast<size_t>(peer), own_numel * element, peer, comm);
  });
  std::byte* const own = at(call.output, own_begin, element);
  reduceInto(
      rank_.runtime,
      call.dtype,
      call.op,
      own,
      sources.data(),
      sources.size(),
      own_numel,
      static_cast<uint32_t>(n),
      rank_.stream);
  others([&](NcclHandle comm, int peer, uint64_t begin, uint64_t nbytes) {
    send(own, own_numel * element, peer, comm);
    recv(at(call.output, begin, element), nbytes, peer, comm);
  });
}

} // namespace pycomm::cuda
