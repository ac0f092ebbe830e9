#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/data/tables.h"
#include "proof/sim/network.h"
#include "schedule/step.h"

namespace pycomm::sim {

inline constexpr int kNoPeer = -2;
/// Seeds from here on also draw messages and codecs.
inline constexpr uint64_t kRichSeeds = 1000000000000;
/// Seeds from here on also draw a rank that leaves while operations are in flight.
inline constexpr uint64_t kLeavingSeeds = 1500000000000;
/// Seeds from here on draw several groups of the same ranks.
inline constexpr uint64_t kGroupSeeds = 2000000000000;

/// One call of one rank's program.
struct CallPlan {
  int key = -1; ///< operation of the common program: determines the data. -1: an operation that the other ranks lack
  ScheduleRequest request;
  uint32_t tag = 0;
  int peer = kNoPeer; ///< of a message: the peer's rank, or PointToPoint::kAnyRank
  bool altered = false; ///< differs from the common program
  bool in_place = false;
  bool waits = true; ///< waits for its end before the next call
  Nanos think{0}; ///< pause before the call
  int64_t timeout_ms = 20000;
};

enum class FaultKind : uint8_t {
  Kill, ///< the process ends; its links close after `duration`
  Sleep, ///< all ranks have no turns for `duration`: their host slept, their containers were paused
  Stop, ///< no turns for `duration`, then it continues
  Reset, ///< connections between `rank` and `other` are reset
  BlockPair, ///< bytes between the two are delayed for `duration`
  BlockOut, ///< nothing that `rank` sends arrives
  BlockIn, ///< nothing arrives at `rank`
  Isolate, ///< BlockOut and BlockIn
  Late, ///< enters an operation too late
  Mismatch, ///< its program differs from the common one
  Leave, ///< closes its group before one of its calls
  Abort, ///< aborts the group on purpose
  LeaveNow, ///< closes its group, also while its operations are in flight
};
[[nodiscard]] const char* faultName(FaultKind kind) noexcept;

struct FaultPlan {
  FaultKind kind = FaultKind::Kill;
  int rank = 0;
  int other = -1;
  Nanos at{0}; ///< since the beginning, unless `after_frames` is set
  int64_t after_frames = -1; ///< after this many frames have been sent
  Nanos duration{0};
  std::string text; ///< for a mismatch: the difference
};

struct RankPlan {
  std::vector<CallPlan> calls;
  SimLoop::Pace data_loop_pace;
  bool goes_on_after_error = false; ///< its user issues the remaining calls after an error
  Nanos closes_after{0}; ///< after the last operation, or after an error
  int leaves_before = -1; ///< the call before which it closes; -1: none
  int aborts_before = -1;
};

/// All decisions that follow from a seed.
struct Plan {
  uint64_t seed = 0;
  int size = 2;
  bool prompt = true; ///< delays are far below the merge window, so all ranks must agree on the cause
  Network::Weather weather;
  Limits limits;
  std::vector<CallPlan> program; ///< the program of all ranks
  std::vector<RankPlan> ranks;
  std::vector<FaultPlan> faults;

  [[nodiscard]] std::string text() const;
};

[[nodiscard]] Plan makePlan(uint64_t seed);

/// The settings that a group of a cluster gets instead of drawing them itself.
struct GroupFrame {
  int size = 2;
  bool prompt = true;
  Network::Weather weather;
  bool faulty = false; ///< true for the one group whose faults are used
};
[[nodiscard]] Plan makePlan(uint64_t seed, const GroupFrame& frame);

// ---- its parts: each in a file of its own
/// Draws a call that makeSchedule() accepts on every rank.
[[nodiscard]] CallPlan drawCall(Random& random, int key, int size, int64_t window_nbytes);
/// The elements that `rank` sends to each rank in an uneven all_to_all, or receives from each.
[[nodiscard]] std::vector<int64_t> allToAllCounts(int key, int rank, int size, bool receives);
/// Adds one fault to the plan, and changes the programs if the fault is in a program.
void drawFault(Random& random, Plan& plan);
/// Adds a rank that leaves while operations are in flight.
void drawLeaving(Random& random, Plan& plan);
/// Adds messages between ranks, and codecs.
void drawExtras(Random& random, Plan& plan);
[[nodiscard]] std::string callText(const CallPlan& call);

} // namespace pycomm::sim
