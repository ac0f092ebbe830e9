#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proof/sim/run.h"

namespace pycomm::sim {

/// What a run must not have done; empty if it kept every promise.
[[nodiscard]] std::vector<std::string> violationsOf(const Run& run);

/// One seed, from plan to verdict.
struct Report {
  uint64_t seed = 0;
  std::vector<std::string> violations;
  std::vector<std::string> trace; ///< in words, where asked for
  std::string plan;
  std::string first_fault; ///< its name, "none", or "several"
  bool group_failed = false; ///< on some rank
  int64_t operations = 0;
  int64_t succeeded = 0;
  int64_t frames = 0;
  int64_t events = 0;
  Nanos elapsed{0};
  uint64_t fingerprint = 0;
};
[[nodiscard]] Report simulate(uint64_t seed, bool keeps_trace = false);

} // namespace pycomm::sim
