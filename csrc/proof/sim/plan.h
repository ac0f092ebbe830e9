#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/data/protocol.h"
#include "proof/sim/network.h"
#include "schedule/step.h"

namespace pycomm::sim {

inline constexpr int kNoPeer = -2;
/// From here on a seed draws messages and codecs, too.
inline constexpr uint64_t kRichSeeds = 1000000000000;
/// From here on a rank leaves besides, in the middle of whatever it does.
inline constexpr uint64_t kLeavingSeeds = 1500000000000;
/// From here on it draws several groups of the same ranks.
inline constexpr uint64_t kGroupSeeds = 2000000000000;

/// One call of one rank's program.
struct CallPlan {
  int key = -1; ///< which operation of the common program it is: says what the data are. -1: one that the others lack
  ScheduleRequest request;
  uint32_t tag = 0;
  int peer = kNoPeer; ///< of a message: a rank, or PointToPoint::kAnyRank
  bool altered = false; ///< not what the common program says
  bool in_place = false;
  bool waits = true; ///< for its end before the next call
  Nanos think{0}; ///< before it
  int64_t timeout_ms = 20000;
};

enum class FaultKind : uint8_t {
  Kill, ///< the process ends; its links close after `duration`
  Sleep, ///< all ranks at once have no turns for `duration`: their host slept, their containers were paused
  Stop, ///< no turns for `duration`, then it goes on
  Reset, ///< connections between `rank` and `other` are reset
  BlockPair, ///< nothing passes between the two for `duration`
  BlockOut, ///< nothing that `rank` sends arrives
  BlockIn, ///< nothing arrives at `rank`
  Isolate, ///< both
  Late, ///< comes too late to an operation
  Mismatch, ///< its program differs
  Leave, ///< closes its group before one of its calls
  Abort, ///< ends everything on purpose
  LeaveNow, ///< closes its group, whatever it waits for
};
[[nodiscard]] const char* faultName(FaultKind kind) noexcept;

struct FaultPlan {
  FaultKind kind = FaultKind::Kill;
  int rank = 0;
  int other = -1;
  Nanos at{0}; ///< since the beginning, or
  int64_t after_frames = -1; ///< once so many frames have been sent
  Nanos duration{0};
  std::string text; ///< what differs, for a mismatch
};

struct RankPlan {
  std::vector<CallPlan> calls;
  SimLoop::Pace lane_pace;
  bool goes_on_after_error = false; ///< its user issues the rest nevertheless
  Nanos closes_after{0}; ///< after the last operation, or after an error
  int leaves_before = -1; ///< the call before which it closes; -1: none
  int aborts_before = -1;
};

/// Everything that a seed decides.
struct Plan {
  uint64_t seed = 0;
  int size = 2;
  bool prompt = true; ///< delays are far below the merge window: then all ranks must agree on the cause
  Network::Weather weather;
  Protocol::Config limits;
  std::vector<CallPlan> program; ///< the common one
  std::vector<RankPlan> ranks;
  std::vector<FaultPlan> faults;

  [[nodiscard]] std::string text() const;
};

[[nodiscard]] Plan makePlan(uint64_t seed);

/// What a group of several does not draw by itself.
struct GroupFrame {
  int size = 2;
  bool prompt = true;
  Network::Weather weather;
  bool faulty = false; ///< the one whose draw of faults counts
};
[[nodiscard]] Plan makePlan(uint64_t seed, const GroupFrame& frame);

} // namespace pycomm::sim
