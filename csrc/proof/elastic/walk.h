#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pycomm::elastic::sim {

/// All orders of events of a few processes in the middle of one step, of which one dies at any moment, or is suspected although it lives.
///
/// The events: a message arrives (those of a pair in order), a process seals, a bucket or the commit round ends somewhere, a process enters
/// the commit round, the end of the dead one's connections or its certificate reaches another, and a process's clock goes on to its next
/// tick, each clock for itself. So a process may be slower than another by any factor. A state that was reached before is not gone on from
/// again.
struct Scope {
  int processes = 3;
  int dies = -1; ///< this one may die at any moment
  bool certified = true; ///< the others learn from the kernel that it has ended
  int suspects = -1; ///< this one may suspect `suspected` at any moment, once
  int suspected = -1;
  int ticks = 2; ///< of each process, at most
  size_t most_states = 5'000'000;
};

struct Walked {
  size_t states = 0;
  size_t ends = 0; ///< states after which nothing happens any more
  size_t decided = 0; ///< of these, with a next view
  size_t committed = 0; ///< of these, with a step that was committed with the sums of all members
  std::string wrong; ///< the first broken promise, and the events that led to it
};

[[nodiscard]] Walked walk(const Scope& scope);

} // namespace pycomm::elastic::sim
