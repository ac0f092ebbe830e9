#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "elastic/step_ledger.h"
#include "proof/sim/random.h"

namespace pycomm::elastic::sim {

/// The events that a fault counts, if it strikes after so many.
enum class Moment : uint8_t {
  Any,
  EntersCommit, ///< a process enters the commit round of its step
  CommitEnds, ///< the commit round ends on a process
  Seals, ///< a process has failed all operations of its epoch
  Loads, ///< a newcomer has loaded the members' state
  EntersAdmission, ///< as EntersCommit, of an Admission
  AdmissionEnds,
};
inline constexpr int kMoments = 7;

/// What a seed draws: processes, the network, the faults. All times in microseconds.
struct Fault {
  enum class Kind {
    Kill, ///< the process ends
    Stop, ///< SIGSTOP, then SIGCONT `lasts` later
    Cut, ///< nothing from `process` arrives at `other`; `both` ways
    Partition, ///< nothing passes between the processes in `side` and the others; `both` or one way
    Reset, ///< the connections of a pair break
    FalseEnd, ///< `other` takes `process` for dead: its connection ended, though it lives
    ProgramError, ///< a mismatch, a deadline, an abort: no matter of membership
    Leave, ///< the process is asked to leave (SIGTERM)
    Newcomer, ///< a process starts and asks to be admitted
  };
  Kind kind = Kind::Kill;
  int64_t at_us = 0;
  int64_t after_events = 0; ///< if not 0: after so many events of the run, or of `moment`, and not at `at_us`
  Moment moment = Moment::Any;
  int after_actions = -1; ///< Kill: the process executes so many actions of its next event and no more
  int process = 0;
  int other = 0;
  uint32_t side = 0;
  bool both = true;
  int64_t lasts_us = 0; ///< 0: for ever
  int64_t restart_us = 0; ///< Kill: a newcomer starts so much later; 0: none
  int code = 0; ///< ProgramError: which
};

struct Plan {
  uint64_t seed = 0;
  int processes = 2;
  std::vector<int> hosts; ///< of each process
  int steps = 3;
  std::vector<Round> program; ///< the steps, and what is between them
  int buckets = 2; ///< of a step
  int min_ranks = 1;
  bool accept_split_brain = false;
  bool certifies = true; ///< processes of a host learn from the kernel that one of them has ended
  int64_t certificate_us = 20'000; ///< the kernel says so within this
  bool fifo = true; ///< a pair's messages arrive in order, and once
  bool lossy = false; ///< a cut loses what is sent into it; else that arrives when the cut ends
  bool through_wire = false; ///< messages are encoded and decoded
  int slow_percent = 1; ///< of the messages take up to 0.3 s
  int64_t delay_us = 100; ///< of a message, about
  int64_t compute_us = 20000; ///< of a step, about
  int dead_after_ms = 3000;
  int quorum_wait_ms = 10000;
  int join_pause_ms = 4000;
  std::vector<Fault> faults;

  [[nodiscard]] std::string text() const;
};

[[nodiscard]] Plan drawPlan(uint64_t seed);

} // namespace pycomm::elastic::sim
