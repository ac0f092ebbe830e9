// Checks the culprit of each failure, and the time until it is reported.
#include <algorithm>
#include <optional>
#include <set>

#include "proof/sim/verdict.h"

namespace pycomm::sim {
namespace {

constexpr Nanos kForLong =
    milliseconds(3700); // longer than silence may last: 3 s, and half a second until somebody looks
constexpr Nanos kBriefly = milliseconds(2400); // shorter

/// The permitted results of one fault.
struct Expectation {
  std::set<int> culprits;
  std::set<ErrorCode> codes;
  std::optional<TimePoint> due; ///< every rank that is still open must have failed by then
  bool harmless = false; ///< no rank may fail at all
  bool ambiguous = false; ///< a blockade ends while ranks count the silence: chance decides the first heartbeat
  bool splits = false; ///< the two sides cannot communicate: each agrees for itself
};

Expectation expectationOf(const Run& run, const FaultRecord& fault) {
  Expectation expected;
  const FaultPlan& plan = fault.plan;
  const Nanos slack = milliseconds(150);
  expected.culprits = {plan.rank};
  switch (plan.kind) {
    case FaultKind::Kill:
      expected.codes = {ErrorCode::PeerDead, ErrorCode::ConnectFailed};
      expected.due = fault.at + plan.duration + slack;
      break;
    case FaultKind::Reset:
      // PeerLeft: the peer's last frames were lost with the link. ConnectionReset: no operation waited for the link.
      expected.codes = {ErrorCode::PeerDead, ErrorCode::PeerLeft, ErrorCode::ConnectionReset};
      expected.culprits.insert(plan.other);
      expected.splits = run.plan().size == 2; // no rank is left between the two
      break;
    case FaultKind::Stop:
    case FaultKind::BlockPair:
    case FaultKind::BlockOut:
    case FaultKind::BlockIn:
    case FaultKind::Isolate: {
      expected.harmless = plan.duration < kBriefly;
      expected.ambiguous = plan.kind != FaultKind::Stop && plan.duration < kForLong;
      expected.codes = {ErrorCode::PeerUnresponsive};
      if (plan.kind == FaultKind::BlockPair) {
        expected.culprits.insert(plan.other);
        expected.codes.insert(ErrorCode::Timeout); // no heartbeats between ranks that are not neighbours
        expected.splits = run.plan().size == 2;
      } else if (plan.duration > kForLong) {
        expected.due = fault.at + kForLong + slack;
      }
      if (plan.kind == FaultKind::BlockIn && run.plan().size == 2) {
        expected.culprits.insert(1 - plan.rank); // with two ranks, the one that receives nothing cannot know the cause
      }
      if (plan.kind == FaultKind::Isolate) {
        expected.splits = true;
      }
      break;
    }
    case FaultKind::Sleep:
      expected.harmless = true;
      break;
    case FaultKind::Late:
      expected.codes = {ErrorCode::Timeout};
      break;
    case FaultKind::Mismatch:
      expected.codes = {ErrorCode::CollectiveMismatch};
      // One side ran out of calls. Or the other rank's own call ended early (a root's does) and it left before any rank
      // compared the calls.
      expected.codes.insert(ErrorCode::PeerLeft);
      break;
    case FaultKind::Leave:
    case FaultKind::LeaveNow:
      // A rank without a control link to it only finds that its port no longer accepts connections.
      expected.codes = {ErrorCode::PeerLeft, ErrorCode::ConnectFailed};
      break;
    case FaultKind::Abort:
      expected.codes = {ErrorCode::Aborted};
      break;
  }
  if (run.ranks()[static_cast<size_t>(plan.rank)].user->closingSince() < fault.at) {
    expected.due.reset(); // it was leaving in order, and a rank that has its goodbye need not report it missing
    if (plan.kind == FaultKind::Kill) {
      expected.codes.insert(ErrorCode::PeerLeft);
    }
  }
  return expected;
}

std::string culpritText(const ErrorRecord& cause) {
  return std::string(errorCodeName(cause.code)) + " of rank " + std::to_string(cause.peer) + " noticed by rank " +
      std::to_string(cause.rank);
}

class Failures {
 public:
  explicit Failures(const Run& run) : run_(run) {}

  std::vector<std::string> take() {
    std::vector<FaultRecord> faults = run_.faults();
    // A fault that is over before any rank could notice it does not count.
    const auto harmless = [&](const FaultRecord& fault) { return expectationOf(run_, fault).harmless; };
    faults.erase(std::remove_if(faults.begin(), faults.end(), harmless), faults.end());
    if (unclear()) {
      return {};
    }
    if (faults.empty()) {
      for (int rank = 0; rank < run_.plan().size; ++rank) {
        if (const auto& cause = causeOf(rank)) {
          add("rank " + std::to_string(rank) + " failed without a fault: " + culpritText(*cause));
        }
      }
    } else if (run_.faults().size() == 1) {
      single(faults.front());
    } else {
      several();
    }
    return std::move(violations_);
  }

 private:
  void add(std::string what) {
    violations_.push_back(std::move(what));
  }
  /// The error with which the rank's user saw its group fail; nullopt if the user had finished and was leaving already.
  [[nodiscard]] const std::optional<ErrorRecord>& causeOf(int rank) const {
    static const std::optional<ErrorRecord> kNothing;
    const RankState& state = run_.ranks()[static_cast<size_t>(rank)];
    const auto& outcomes = state.user->outcomes();
    const bool hurt = std::any_of(outcomes.begin(), outcomes.end(), [](const auto& outcome) { return outcome->error; });
    const bool seen = hurt || state.group->failedAt() < state.user->closingSince();
    return seen ? state.group->failure() : kNothing;
  }

  /// Ranks that left in order make some results ambiguous by nature:
  ///  - if a rank has no control link to the others that are still there, it learns of events by the end of bulk links;
  ///  - a goodbye that is in flight during a blockade is lost when its sender's kernel gives the connection up.
  [[nodiscard]] bool unclear() const {
    bool somebody_left = false;
    for (int rank = 0; rank < run_.plan().size; ++rank) {
      const RankState& state = run_.ranks()[static_cast<size_t>(rank)];
      somebody_left = somebody_left || (state.user->closingSince() != TimePoint::max() && !causeOf(rank));
    }
    bool blockade = false;
    for (const FaultRecord& fault : run_.faults()) {
      const FaultKind kind = fault.plan.kind;
      blockade = blockade || kind == FaultKind::BlockPair || kind == FaultKind::BlockOut ||
          kind == FaultKind::BlockIn || kind == FaultKind::Isolate;
    }
    const bool struck = std::any_of(run_.faults().begin(), run_.faults().end(), [](const FaultRecord& fault) {
      return fault.plan.kind != FaultKind::Sleep;
    });
    return somebody_left && struck && (run_.plan().size > 5 || blockade);
  }

  void single(const FaultRecord& fault) {
    const Expectation expected = expectationOf(run_, fault);
    std::optional<ErrorRecord> agreed;
    int agreed_rank = -1;
    for (int rank = 0; rank < run_.plan().size; ++rank) {
      const RankState& state = run_.ranks()[static_cast<size_t>(rank)];
      const std::string who = "rank " + std::to_string(rank);
      if (!causeOf(rank)) {
        const bool stopped =
            fault.plan.kind == FaultKind::Stop && rank == fault.plan.rank; // the others may have ended in order
        const bool closed_before = expected.due && state.user->closingSince() <= *expected.due;
        if (expected.due && !state.group->dead() && !closed_before && !stopped) {
          add(who + " never learned of the fault");
        }
        continue;
      }
      const ErrorRecord& cause = *causeOf(rank);
      const bool cut_off = expected.splits && rank == fault.plan.rank;
      if (run_.plan().prompt && !expected.ambiguous) {
        checkCause(who, cause, expected, cut_off, fault);
        const bool stopped = fault.plan.kind == FaultKind::Stop && rank == fault.plan.rank;
        const TimePoint closing = state.user->closingSince();
        if (expected.due && !stopped && state.group->failedAt() > *expected.due && closing > *expected.due) {
          add(who + " failed " + std::to_string((state.group->failedAt() - *expected.due) / milliseconds(1)) +
              " ms later than it must");
        }
        if (!cut_off && agreed && (agreed->code != cause.code || agreed->peer != cause.peer)) {
          add("rank " + std::to_string(agreed_rank) + " ends with " + culpritText(*agreed) + ", " + who + " with " +
              culpritText(cause));
        }
        if (!cut_off && !agreed) {
          agreed = cause;
          agreed_rank = rank;
        }
      }
    }
  }

  void checkCause(
      const std::string& who,
      const ErrorRecord& cause,
      const Expectation& expected,
      bool cut_off,
      const FaultRecord& fault) {
    if (expected.codes.count(cause.code) == 0) {
      add(who + " ends with " + culpritText(cause) + ", which a " + faultName(fault.plan.kind) + " is not");
      return;
    }
    if (cause.code == ErrorCode::CollectiveMismatch) {
      if (cause.peer != fault.plan.rank && cause.rank != fault.plan.rank) {
        add(who + " ends with " + culpritText(cause) + ", but rank " + std::to_string(fault.plan.rank) + " differs");
      }
      return;
    }
    if (cause.code == ErrorCode::Timeout) {
      checkTimeout(who, cause);
      return;
    }
    const bool mismatched = fault.plan.kind == FaultKind::Mismatch; // either side may run out of calls first
    if (!cut_off && !mismatched && expected.culprits.count(cause.peer) == 0) {
      add(who + " blames rank " + std::to_string(cause.peer) + " for what happened to rank " +
          std::to_string(fault.plan.rank) + ": " + culpritText(cause));
    }
  }

  /// A timeout that names the ranks that have not entered must name the right ones.
  void checkTimeout(const std::string& who, const ErrorRecord& cause) {
    if (cause.phase != ErrorPhase::NotEntered || cause.peer < 0 || cause.sequence <= 0) {
      return;
    }
    const auto id = static_cast<uint64_t>(cause.sequence);
    const Outcome* theirs = run_.ranks()[static_cast<size_t>(cause.peer)].user->collective(id);
    const Outcome* mine = run_.ranks()[static_cast<size_t>(cause.rank)].user->collective(id);
    if (theirs != nullptr && mine != nullptr &&
        theirs->issued < mine->issued + milliseconds(mine->call.timeout_ms) - milliseconds(150)) {
      add(who + " says that rank " + std::to_string(cause.peer) + " has not entered call " +
          std::to_string(cause.sequence) + ", but it had");
    }
  }

  void several() {
    std::set<int> faulty;
    bool anything = false; // a fault that makes honest ranks look late, or that has more than one side
    for (const FaultRecord& fault : run_.faults()) {
      const Expectation expected = expectationOf(run_, fault);
      faulty.insert(expected.culprits.begin(), expected.culprits.end());
      anything = anything || expected.splits || expected.ambiguous || fault.plan.kind == FaultKind::BlockIn ||
          fault.plan.kind == FaultKind::BlockPair;
    }
    for (int rank = 0; rank < run_.plan().size; ++rank) {
      const auto& cause = causeOf(rank);
      if (!cause || anything || !run_.plan().prompt) {
        continue;
      }
      // A rank that receives no heartbeat at all reports itself; it cannot know that all its neighbours are gone.
      const bool lonely = cause->code == ErrorCode::PeerUnresponsive && cause->peer == cause->rank;
      const bool named = lonely || faulty.count(cause->peer) != 0 || faulty.count(cause->rank) != 0;
      if (!named && cause->code != ErrorCode::Timeout) {
        add("rank " + std::to_string(rank) + " ends with " + culpritText(*cause) + ", who did nothing wrong");
      }
    }
  }

  const Run& run_;
  std::vector<std::string> violations_;
};

} // namespace

std::vector<std::string> failureViolations(const Run& run) {
  return Failures(run).take();
}

} // namespace pycomm::sim
