#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proof/elastic/plan.h"

namespace pycomm::elastic::sim {

struct Report {
  std::vector<std::string> violations;
  std::vector<std::string> trace; ///< if asked for
  int64_t events = 0;
  int64_t messages = 0;
  int64_t agreements = 0; ///< views that were installed, by anyone
  int64_t redone = 0; ///< steps, counted on each process
  int64_t committed = 0; ///< rounds, by anyone
  int64_t admissions = 0; ///< rounds of that kind, counted on each process
  int64_t joined = 0; ///< newcomers that became members
  int64_t raised = 0; ///< errors for users
  uint64_t digest = 0; ///< of all events
};

/// Runs a plan in virtual time: Agreement and StepLedger as they ship, with a model of everything around them.
///
/// The model. A program is a list of steps, some with a mean() behind. A process computes, launches the buckets of a round one by one, and
/// enters commit when all have ended. As a forward pass begins, it makes an Admission if one is due, and rank 0 gives newcomers its state. A
/// bucket, and the commit round, ends nowhere before all members have entered it; where a member dies or is cut off, it may end on some and
/// not on others.
/// The failure detector reports silence of dead_after_ms, the end of a process on its connections, and broken connections. The processes of
/// a host learn of an end from the kernel. A process that is stopped gets all that came when it continues.
[[nodiscard]] Report run(const Plan& plan, bool trace = false);

} // namespace pycomm::elastic::sim
