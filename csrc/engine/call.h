#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer_view.h"
#include "base/deadline.h"
#include "schedule/step.h"

namespace pycomm {

/// What one rank asks its group for. The group sets schedule.rank and schedule.size.
struct Call {
  ScheduleRequest schedule;
  ConstBufferView input;
  BufferView output;
  /// Instead of `input` or `output`: a buffer for each rank's part, in rank order. Only where Group::keepsParts() says so.
  std::vector<ConstBufferView> input_parts;
  std::vector<BufferView> output_parts;
  Deadline deadline = Deadline::never(); ///< set by the caller: PycommBackend::call() turns torch's timeout into it
  uint32_t tag = 0;
  double premul_factor = 1.0;
  /// Error-feedback residual, float32, same size as `input`; of an all_reduce Sum of Float32 with a codec only. In: added to the values
  /// before encoding. Out: value - decode(encode(value)), plus the same of each sum that this rank encodes. Unchanged if nothing is
  /// encoded; undefined on failure.
  BufferView residual;
  int peer = -1; ///< send and recv (instead of schedule.root): a rank, or PointToPoint::kAnyRank for recv
  bool waits = false; ///< the caller calls Group::wait() next: the data loop need not be woken for it
  bool held = false; ///< Group::start() gives it its place in the order of operations, Group::release() lets it begin
  /// Of a call with a codec (not PREMUL_SUM, not `residual`, even parts): `input` holds the values encoded already, each part from its own
  /// first value; `output` shall, of an all_reduce, get the result as it travels.
  bool input_encoded = false;
  bool output_encoded = false;
  /// Of a held one: it may begin when the first pieces of its input have come. How it is cut is in its Operation::request(), if
  /// it is large enough to be cut. `input` and `output` are the same memory, or do not overlap.
  bool in_pieces = false;
};

} // namespace pycomm
