#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "schedule/partition.h"
#include "schedule/step.h"

namespace pycomm {

/// A step's index in its schedule.
using StepId = uint32_t;
inline constexpr StepId kNoStep = UINT32_MAX;
using Deps = std::vector<StepId>; ///< kNoStep entries are skipped

/// Bytes of one edge that an executor always accepts from the sender, even if the steps that receive them have not
/// started. The ring needs this promise, because each of its ranks waits until the next one has room.
inline constexpr int64_t kEdgeRoomNbytes = 2 << 20;
/// Upper bound of a segment, also if the request asks for more: one in flight and one more fit into the edge's room.
inline constexpr int64_t kMaxSegmentNbytes = kEdgeRoomNbytes / 2;

[[nodiscard]] constexpr Region inputRegion(Run run) noexcept {
  return {Buffer::Input, run.offset, run.numel};
}
[[nodiscard]] constexpr Region outputRegion(Run run) noexcept {
  return {Buffer::Output, run.offset, run.numel};
}
[[nodiscard]] constexpr Region bufferRegion(Buffer buffer, Run run) noexcept {
  return {buffer, run.offset, run.numel};
}

/// The request with segments so short that (pipeline_frames + 1) * size of them fit into `nbytes` of scratch: a group of
/// 64 ranks would take 80 MiB, which is mapped and unmapped anew for each operation. Depends on what all ranks have in
/// common.
[[nodiscard]] ScheduleRequest withScratchOf(const ScheduleRequest& request, int64_t nbytes);

/// Lists the steps of one rank. There is one function per step kind, so that no algorithm fills in a Step by hand.
///
/// The order of operands is the same everywhere: of an arriving and a local operand, the one of the lower rank comes
/// first. An arriving operand counts as that of the rank that sent it.
class ScheduleBuilder {
 public:
  ScheduleBuilder(const ScheduleRequest& request, Algorithm algorithm);

  [[nodiscard]] int32_t rank() const noexcept {
    return request_.rank;
  }
  [[nodiscard]] int32_t size() const noexcept {
    return request_.size;
  }
  /// The rank `distance` places further round the ring; negative distances go back.
  [[nodiscard]] int32_t around(int64_t distance) const noexcept;

  /// Number of segments for `numel` elements of `dtype`: at least one, since an empty frame is still a frame. It
  /// depends on nothing else, so both ends of an edge cut their data alike.
  [[nodiscard]] int64_t segmentCount(int64_t numel, DType dtype) const noexcept;

  /// Elements of the longest segment.
  [[nodiscard]] int64_t segmentNumel(DType dtype) const noexcept;

  /// Frames of one edge to keep in flight: the request's number, limited so that these and one more have room.
  [[nodiscard]] int64_t pipelineFrames() const noexcept;

  [[nodiscard]] Buffer addScratch(DType dtype, int64_t numel);

  /// This rank's contribution to a sum: the input, or its scaled copy for PremulSum. Call operand() once for each
  /// element. It reuses the place of a copy that a step listed before has read; of one that several steps read, all have
  /// to be listed before the next call.
  struct Operand {
    Region region;
    StepId ready = kNoStep; ///< the step that made it
  };
  [[nodiscard]] Operand operand(Run input);
  /// The same, but scaled copies have the input's offsets, and scratch is as large as the input.
  [[nodiscard]] Operand operandInPlace(Run input);
  /// How many scaled copies operand() keeps at the least before it reuses a place. A copy can be made only when the one
  /// before it in its place has left.
  void keepOperands(int64_t count) noexcept {
    kept_operands_ = count;
  }

  StepId send(Region src, int32_t to, const Deps& deps = {});
  StepId recv(int32_t from, Region dst, const Deps& deps = {});
  StepId recvCopySend(int32_t from, Region dst, int32_t to, const Deps& deps = {});
  StepId recvReduce(int32_t from, const Operand& local, Region dst, bool final, const Deps& deps = {});
  StepId recvReduceSend(int32_t from, const Operand& local, int32_t to, const Deps& deps = {});
  /// The value is complete: Avg divides here.
  StepId recvReduceCopySend(int32_t from, const Operand& local, Region dst, int32_t to, const Deps& deps = {});
  /// All regions have the dtype of `dst`. The value is complete: Avg divides here.
  StepId reduceMany(const std::vector<Region>& sources, Region dst, const Deps& deps);
  /// The same over encoded regions; `dst` may be encoded, too. `output` is the place of the sums in Output.
  StepId reduceEncoded(const std::vector<Region>& sources, Region dst, Region output, const Deps& deps);
  StepId copy(Region src, Region dst, bool final = false);
  StepId scale(Region src, Region dst, bool final = false, const Deps& deps = {});
  StepId encode(Region src, Region dst, const Deps& deps);
  StepId decode(Region src, Region dst, const Deps& deps);

  [[nodiscard]] Schedule finish() && {
    return std::move(schedule_);
  }

 private:
  /// The place of a scaled copy.
  struct Place {
    Run run; ///< in scaled_
    Deps readers; ///< of the copy that is there
  };
  StepId add(Step step, const Deps& deps);
  void addReader(const Region& region, StepId reader);
  [[nodiscard]] size_t placeFor(int64_t numel);
  Step receiving(StepKind kind, int32_t from) const;

  const ScheduleRequest& request_; ///< outlives the builder: both live within one makeSchedule()
  Schedule schedule_;
  Buffer scaled_ = Buffer::None; ///< PremulSum's inputs after scaling
  std::vector<Place> places_; ///< of operand(), by offset
  size_t next_place_ = 0; ///< the one that was filled first
  int64_t kept_operands_;
};

} // namespace pycomm
