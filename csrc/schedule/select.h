#pragma once

#include <cstdint>
#include <string>

#include "schedule/step.h"

namespace pycomm {

/// The inputs to the choice of an algorithm: nothing that could differ between ranks.
struct SelectionKey {
  Collective kind = Collective::Barrier;
  int32_t size = 1;
  int64_t nbytes = 0; ///< bytes of the whole tensor, all parts together, in its own dtype
  int64_t segment_nbytes = 1;
  bool encoded = false; ///< the request has a codec
  bool small_float_sum = false; ///< a sum of fp16, bf16 or fp8, which loses bits at every rounding
  int32_t hosts = 1;
  int32_t fewest_ranks = 1; ///< ranks on the host that has the fewest
  int32_t most_ranks = 1;
};
[[nodiscard]] SelectionKey selectionKey(const ScheduleRequest& request);

/// The static table behind Algorithm::Auto. Pure, so that all ranks choose alike.
[[nodiscard]] Algorithm selectAlgorithm(const SelectionKey& key) noexcept;

/// The table's reason for its choice, in words.
[[nodiscard]] std::string whySelected(const SelectionKey& key);

/// True if makeSchedule() has this algorithm for this collective.
[[nodiscard]] bool hasAlgorithm(Collective kind, Algorithm algorithm) noexcept;

/// True if every step of such a schedule stays within one rank's part of Input and of Output, so that parts may be
/// separate buffers. False for collectives without parts.
[[nodiscard]] bool keepsParts(Collective kind, Algorithm algorithm) noexcept;

/// Smaller tensors (their whole size counts) are not encoded: they cost latency, not bandwidth, and a loss or a norm
/// stays exact.
inline constexpr int64_t kMinEncodedNbytes = 16 << 10;

/// `wanted` if it has a meaning for this request, else None. It has one for sums and averages of fp32 and fp64, by
/// all_reduce and reduce_scatter of at least kMinEncodedNbytes, in groups of at least two ranks.
[[nodiscard]] Codec codecFor(const ScheduleRequest& request, Codec wanted) noexcept;

} // namespace pycomm
