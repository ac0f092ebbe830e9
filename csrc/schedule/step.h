#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/codec.h"
#include "base/dtype.h"
#include "base/reduce_op.h"

namespace pycomm {

class TopologyView;

/// The collective of an operation. Part of the wire format: never reuse a number.
enum class Collective : uint8_t {
  AllReduce = 1,
  Broadcast = 2,
  AllGather = 3,
  Barrier = 4,
  Reduce = 5,
  ReduceScatter = 6,
  AllToAll = 7,
  Gather = 8,
  Scatter = 9,
  Send = 10,
  Recv = 11,
};
[[nodiscard]] const char* collectiveName(Collective kind) noexcept; // "all_reduce"

/// The algorithm of a collective. Part of the wire format.
enum class Algorithm : uint16_t {
  Auto = 0,
  Ring = 1,
  RecursiveDoubling = 2,
  BinomialTree = 3,
  Direct = 4,
  Pairwise = 5,
  Bruck = 6,
  RecursiveHalving = 7,
  SharedMemory = 8, ///< no schedule: the ranks of one host exchange data in shared memory (engine/host/host_plane.h)
  Hierarchical = 9,
  Nccl = 10, ///< no schedule: NCCL moves the bytes (Group::follow)
};
[[nodiscard]] const char* algorithmName(Algorithm algorithm) noexcept;
/// The algorithm of this name, among those that users may select; "auto" is one.
[[nodiscard]] std::optional<Algorithm> algorithmNamed(const std::string& name);

/// Memory a step reads or writes. Scratch k is Scratch0 + k.
enum class Buffer : uint16_t { None = 0, Input = 1, Output = 2, Scratch0 = 16 };

/// A run of elements in one buffer.
struct Region {
  Buffer buffer = Buffer::None;
  int64_t offset = 0; ///< elements
  int64_t numel = 0;
};

/// The action of a step. `src`, `dst` are local; `recv_peer`, `send_peer` are ranks of the group. An edge a -> b
/// carries its frames in order: the k-th frame that a's schedule sends to b is the k-th that b's receives from a, and
/// both have the same number of elements.
enum class StepKind : uint8_t {
  Send, ///< src -> send_peer
  Recv, ///< recv_peer -> dst
  RecvReduce, ///< dst = op(arriving, src), ordered by `local_first`
  RecvReduceSend, ///< op(arriving, src) is sent on to send_peer; nothing local is written
  RecvReduceCopySend, ///< dst = op(arriving, src), which is also sent on to send_peer
  RecvCopySend, ///< recv_peer -> dst, which is also sent on to send_peer
  ReduceMany, ///< dst = op over all of `sources`, in their order, one rounding; divides for Avg when `final`
  Copy, ///< dst = src
  Scale, ///< dst = src * the operation's premul factor
  Encode, ///< dst, encoded = src
  Decode, ///< dst = src, decoded
  ReduceEncoded, ///< dst = op over the decoded `sources`, in their order, in fp32, divided for Avg; encoded once if dst is
};
[[nodiscard]] const char* stepKindName(StepKind kind) noexcept;
[[nodiscard]] constexpr bool receives(StepKind kind) noexcept {
  return kind == StepKind::Recv || kind == StepKind::RecvReduce || kind == StepKind::RecvReduceSend ||
      kind == StepKind::RecvReduceCopySend || kind == StepKind::RecvCopySend;
}
[[nodiscard]] constexpr bool sends(StepKind kind) noexcept {
  return kind == StepKind::Send || kind == StepKind::RecvReduceSend || kind == StepKind::RecvReduceCopySend ||
      kind == StepKind::RecvCopySend;
}

struct Step {
  StepKind kind = StepKind::Copy;
  bool local_first = false; ///< the local operand belongs to a lower rank than the arriving one
  bool final = false; ///< the resulting value is complete: Avg divides here, once, before rounding if the step kind can
  int32_t recv_peer = -1;
  int32_t send_peer = -1;
  Region src;
  Region dst;
  uint32_t deps_begin = 0, deps_end = 0; ///< range in Schedule::deps: steps that must have ended before this one starts
  uint32_t sources_begin = 0, sources_end = 0; ///< range in Schedule::sources, for ReduceMany and ReduceEncoded
};

/// The steps of one rank in one collective: plain data, made by a pure function, cached and shared. Every dependency of
/// a step comes earlier in the list. The frames of each edge are received, and sent, in the order in which the steps
/// are listed.
struct Schedule {
  Collective kind = Collective::Barrier;
  Algorithm algorithm = Algorithm::Auto;
  int32_t rank = 0;
  int32_t size = 1;
  std::vector<Step> steps;
  std::vector<uint32_t> deps;
  std::vector<Region> sources;
  std::vector<int64_t> scratch_numel; ///< elements of scratch k
  std::vector<DType> scratch_dtype;
  DType dtype = DType::UInt8; ///< dtype of Input and Output
  /// Other than None: scratch of UInt8 holds encoded values, and regions in it count bytes. Input and Output are not
  /// UInt8 then.
  Codec codec = Codec::None;
};

/// The parameters of a collective; the same on all ranks but for `rank`. Equal requests give equal schedules.
struct ScheduleRequest {
  Collective kind = Collective::Barrier;
  Algorithm algorithm = Algorithm::Auto;
  int32_t rank = 0;
  int32_t size = 1;
  int32_t root = -1;
  DType dtype = DType::UInt8;
  Codec codec = Codec::None; ///< encoding on the wire; all_reduce and reduce_scatter
  ReduceOp reduce_op = ReduceOp::None;
  /// all_reduce, broadcast, reduce, send, recv: elements of the tensor. Others: elements of one rank's part; unused if
  /// `counts` is given.
  int64_t numel = 0;
  int64_t segment_nbytes = 256 << 10;
  std::vector<int64_t> counts; ///< uneven collectives: elements per rank (all_to_all: to each rank); empty: even
  std::vector<int64_t> recv_counts; ///< uneven all_to_all: elements that this rank receives from each rank
  /// Frames of one edge that the ring keeps in flight, or fewer if these would exceed 2 MiB. The ring cannot deadlock
  /// if an edge holds this many unread frames beside the one that a step is working on. That is so if the sender may be
  /// this many frames, and one more, ahead of the steps that have ended. The other algorithms need room for one.
  int32_t pipeline_frames = 4;
  /// Maps ranks to hosts. Not owned: it outlives the request and its copies. Null: each rank has a host of its own.
  const TopologyView* topology = nullptr;
};

} // namespace pycomm
