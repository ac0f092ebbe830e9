#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proof/sim/run.h"

namespace pycomm::sim {

/// The promises that a run broke; empty if it kept all.
[[nodiscard]] std::vector<std::string> violationsOf(const Run& run);
/// Of these, that groups failed only if they may, soon enough, and with the right cause, the same on all ranks.
[[nodiscard]] std::vector<std::string> failureViolations(const Run& run);

/// Of all that a build of the engine may not change unnoticed: every frame, and of each operation its descriptor, input, result, error
/// and time.
[[nodiscard]] uint64_t digestOf(const Run& run);

/// The result of one seed, from plan to verdict.
struct Report {
  uint64_t seed = 0;
  std::vector<std::string> violations;
  std::vector<std::string> trace; ///< in words; empty unless requested
  std::string plan;
  std::string first_fault; ///< the name of the fault, "none", or "several"
  bool group_failed = false; ///< on some rank
  int64_t operations = 0;
  int64_t succeeded = 0;
  int64_t frames = 0;
  int64_t events = 0;
  Nanos elapsed{0};
  uint64_t fingerprint = 0; ///< digestOf(), of all groups
};
[[nodiscard]] Report simulate(uint64_t seed, bool keeps_trace = false);

} // namespace pycomm::sim
