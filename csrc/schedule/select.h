#pragma once

#include <cstdint>
#include <string>

#include "schedule/step.h"

namespace pycomm {

/// What the choice of an algorithm depends on: nothing that could differ between ranks.
struct SelectionKey {
  Collective kind = Collective::Barrier;
  int32_t size = 1;
  int64_t nbytes = 0; ///< of the whole tensor, all parts together, in its own dtype
  int64_t segment_nbytes = 1;
  bool encoded = false; ///< there is a codec
  bool small_float_sum = false; ///< a sum of fp16, bf16 or fp8, which loses bits at every rounding
  int32_t hosts = 1;
  int32_t fewest_ranks = 1; ///< of a host
  int32_t most_ranks = 1;
};
[[nodiscard]] SelectionKey selectionKey(const ScheduleRequest& request);

/// The static table behind Algorithm::Auto. Pure, so that all ranks choose alike by construction.
[[nodiscard]] Algorithm selectAlgorithm(const SelectionKey& key) noexcept;

/// Why that is what the table says, in words.
[[nodiscard]] std::string whySelected(const SelectionKey& key);

/// Whether makeSchedule() has this algorithm for this collective.
[[nodiscard]] bool hasAlgorithm(Collective kind, Algorithm algorithm) noexcept;

/// Whether every step of such a schedule keeps within one rank's part of Input and of Output, so that parts may be
/// separate buffers. False for collectives that have no parts.
[[nodiscard]] bool keepsParts(Collective kind, Algorithm algorithm) noexcept;

/// Smaller tensors, counted whole, travel as they are: they cost latency, not bandwidth, and a loss or a norm stays exact.
inline constexpr int64_t kMinEncodedNbytes = 16 << 10;

/// `wanted` where it has a meaning for such a request, else None: sums and averages of fp32 and fp64, by all_reduce and
/// reduce_scatter of at least kMinEncodedNbytes.
[[nodiscard]] Codec codecFor(const ScheduleRequest& request, Codec wanted) noexcept;

} // namespace pycomm
