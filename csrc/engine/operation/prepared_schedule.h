#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "schedule/step.h"

namespace pycomm {

/// One direction of traffic with one peer: which steps use it, in frame order.
struct Edge {
  int32_t peer = -1;
  int64_t nbytes = 0; ///< of all its frames
  std::vector<uint32_t> steps;
};

/// A schedule with what the executor needs to look up, computed once and shared by every operation that runs it.
struct PreparedSchedule {
  Schedule schedule;
  std::vector<uint32_t> dependents; ///< steps that wait for step i: [dependents_begin[i], dependents_begin[i + 1])
  std::vector<uint32_t> dependents_begin;
  std::vector<Edge> incoming;
  std::vector<Edge> outgoing;
  std::vector<int32_t> incoming_of_step; ///< index into `incoming`, -1 for steps that receive nothing
  std::vector<int32_t> outgoing_of_step;
  size_t nbytes = 0; ///< of memory, for all of this

  [[nodiscard]] DType dtypeOf(Buffer buffer) const;
  [[nodiscard]] size_t nbytesOf(const Region& region) const;
  /// Where values of Input or Output begin that lie there encoded, each part of so many from its own first one. The value is the first
  /// of a block.
  [[nodiscard]] size_t encodedOffset(int64_t value, int64_t part_numel) const;
  /// Bytes of the frame that a step receives or sends.
  [[nodiscard]] size_t frameNbytes(const Step& step) const;
};

/// Throws Error(Internal) for a schedule that breaks its own rules (a dependency that points forward, a frame over the wire's
/// limit).
[[nodiscard]] std::shared_ptr<const PreparedSchedule> prepare(Schedule schedule);

} // namespace pycomm
