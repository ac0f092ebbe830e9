#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/job_ranks.h"
#include "schedule/step.h"
#include "transport/frame_header.h"

namespace pycomm {

/// What all ranks of an operation must agree on. Travels in every frame and is compared wherever two ranks meet.
struct Descriptor {
  Collective kind = Collective::Barrier;
  DType dtype = DType::UInt8;
  ReduceOp reduce_op = ReduceOp::None;
  Codec codec = Codec::None; ///< that values travel as
  Algorithm algorithm = Algorithm::Auto; ///< resolved: what really runs
  int32_t root = -1; ///< point-to-point: the sender
  int64_t numel = 0;
  uint32_t tag =
      0; ///< hash of a DDP bucket's name or of the call site, 0: neither is known; point-to-point: the user's tag
  uint32_t digest =
      0; ///< hash of the split sizes; 0 if they are equal, or compared by pair; point-to-point: PointToPoint::Name::index

  [[nodiscard]] bool operator==(const Descriptor& other) const noexcept;
  [[nodiscard]] bool operator!=(const Descriptor& other) const noexcept {
    return !(*this == other);
  }

  /// The codec, or the dtype without one, in one byte, as the header has it, and back. A byte that is neither gives a codec that does
  /// not exist, so a rank of another build is found to differ.
  [[nodiscard]] uint8_t wireByte() const noexcept;
  void setWireByte(uint8_t byte) noexcept;
  /// The codec's name, or "" without one.
  [[nodiscard]] std::string wireName() const;

  /// Of what is asked for, once it is known which algorithm that is. Without a tag.
  [[nodiscard]] static Descriptor of(const ScheduleRequest& request, Algorithm algorithm);

  void writeTo(FrameHeader& header) const noexcept;
  [[nodiscard]] static Descriptor readFrom(const FrameHeader& header) noexcept;

  /// What the operation is on one of its ranks: both ends of a message have the sender's descriptor, and the other end receives.
  [[nodiscard]] Collective kindAt(int rank) const noexcept {
    return kind == Collective::Send && rank >= 0 && rank != root ? Collective::Recv : kind;
  }
  /// "all_reduce(SUM, float32 x 1024, ring)". A message is called by its end: on `rank`, "recv(float32 x 4, from rank 0, tag 7)", or
  /// "send(float32 x 4, to rank 1, tag 7)" if `peer` is the receiver.
  [[nodiscard]] std::string text(const JobRanks& job = {}, int rank = -1, int peer = -1) const;
};

/// Of the split sizes that all ranks must have alike; 0 for even splits, and where each rank has its own.
[[nodiscard]] uint32_t splitsDigest(Collective kind, const std::vector<int64_t>& counts);

} // namespace pycomm
