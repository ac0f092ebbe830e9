#include "proof/sim/verdict.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "engine/operation/issue_context.h"
#include "proof/sim/cluster.h"
#include "proof/sim/digest.h"
#include "proof/sim/oracle.h"

namespace pycomm::sim {
namespace {

/// True if an operation's success implies that all other ranks were in the same operation.
bool needsEveryone(Collective kind) noexcept {
  return kind == Collective::AllReduce || kind == Collective::ReduceScatter || kind == Collective::AllGather ||
      kind == Collective::AllToAll || kind == Collective::Barrier;
}

class Checks {
 public:
  explicit Checks(const Run& run) : run_(run) {}

  std::vector<std::string> take() {
    if (!run_.cameToRest()) {
      add("the run did not come to rest: some rank never closed its group");
    }
    for (const std::string& violation : run_.audit().violations()) {
      add(violation);
    }
    for (int rank = 0; rank < run_.plan().size; ++rank) {
      checkRank(rank);
    }
    for (std::string& violation : failureViolations(run_)) {
      add(std::move(violation));
    }
    return std::move(violations_);
  }

 private:
  void add(std::string what) {
    if (violations_.size() < 20) {
      violations_.push_back(std::move(what));
    }
  }

  void checkRank(int rank) {
    const RankState& state = run_.ranks()[static_cast<size_t>(rank)];
    const std::string who = "rank " + std::to_string(rank);
    for (size_t i = 0; i < state.user->outcomes().size(); ++i) {
      const Outcome& outcome = *state.user->outcomes()[i];
      const std::string what = who + ", call " + std::to_string(i + 1) + ": ";
      if (outcome.ended == TimePoint::max()) {
        if (!state.group->dead()) {
          add(what + "never ended");
        }
        continue;
      }
      if (outcome.input_altered && !outcome.call.in_place) {
        add(what + "its input was written");
      }
      if (std::any_of(outcome.memory.begin(), outcome.memory.end(), [](const auto& each) { return each.written(); })) {
        add(what + "its memory was written after it had ended");
      }
      if (outcome.error) {
        checkError(what, rank, outcome);
      } else {
        checkSuccess(what, rank, outcome);
      }
    }
    std::optional<Usage> usage = state.user->usageAtEnd();
    const bool clean = run_.faults().empty();
    // Hellos to ranks that this one only wanted to query, and that have not accepted yet.
    const size_t greetings = kHelloPayloadNbytes * static_cast<size_t>(run_.plan().size - 1);
    if (clean && usage) {
      usage->staging_nbytes = usage->staging_nbytes > greetings ? usage->staging_nbytes : 0;
      usage->asks = 0; // each goes when it is due, which is after the end of a seed
      if (const std::string held = heldText(*usage); !held.empty()) {
        add(who + " keeps something although every operation has ended: " + held);
      }
    }
  }

  void checkError(const std::string& what, int rank, const Outcome& outcome) {
    const ErrorCode code = outcome.error->code;
    const RankState& state = run_.ranks()[static_cast<size_t>(rank)];
    if (code == ErrorCode::Internal || code == ErrorCode::ProtocolViolation || code == ErrorCode::OutOfMemory) {
      add(what + "ended with " + outcome.error->text());
    }
    if (state.group->failure() && code != state.group->failure()->code && code != ErrorCode::ShutDown) {
      add(what + "its error " + outcome.error->line() + " is not the group's " + state.group->failure()->line());
    }
    if (!state.group->failure() && code != ErrorCode::ShutDown) {
      add(what + "failed although its group did not: " + outcome.error->text());
    }
    // An operation that is issued when the group has failed ends at once.
    const Nanos slack = milliseconds(300) + longestStop(rank);
    const TimePoint due = outcome.issued + milliseconds(outcome.group_had_failed ? 0 : outcome.call.timeout_ms);
    if (outcome.ended > due + slack) {
      add(what + "ended " + std::to_string((outcome.ended - due) / milliseconds(1)) + " ms past its bound");
    }
  }

  [[nodiscard]] Nanos longestStop(int rank) const {
    Nanos longest{0};
    for (const FaultRecord& fault : run_.faults()) {
      const bool stopped = fault.plan.kind == FaultKind::Stop && fault.plan.rank == rank;
      if (stopped || fault.plan.kind == FaultKind::Sleep) {
        longest += fault.plan.duration;
      }
    }
    return longest;
  }

  void checkSuccess(const std::string& what, int rank, const Outcome& outcome) {
    if (outcome.group_had_failed) {
      add(what + "succeeded although its group had failed before it was issued");
    }
    const Collective kind = outcome.call.request.kind;
    for (int other = 0; other < run_.plan().size && needsEveryone(kind); ++other) {
      const Outcome* theirs = run_.ranks()[static_cast<size_t>(other)].user->collective(outcome.op_id);
      if (theirs == nullptr || theirs->issued > outcome.ended) {
        add(what + callText(outcome.call) + " succeeded before rank " + std::to_string(other) + " had entered it");
      } else if (theirs->descriptor != outcome.descriptor) {
        add(what + outcome.descriptor.text() + " succeeded although rank " + std::to_string(other) + " had " +
            theirs->descriptor.text());
      }
    }
    if (outcome.call.altered) {
      return; // no expected output; a mismatched collective that needs all ranks is a violation above
    }
    CallPlan call = outcome.call;
    call.request.rank = rank;
    if (kind == Collective::Recv) {
      call.request.root = outcome.sender;
      if (outcome.call.peer >= 0 && outcome.sender != outcome.call.peer) {
        add(what + callText(call) + " has a message of rank " + std::to_string(outcome.sender));
      }
      if (!heard_.emplace(rank, call.key, outcome.sender).second) {
        add(what + callText(call) + " has the message that another receive has had");
      }
    }
    const std::vector<std::byte> expected = expectedOutput(call);
    if (outcome.output != expected) {
      size_t at = 0;
      while (at < expected.size() && at < outcome.output.size() && expected[at] == outcome.output[at]) {
        ++at;
      }
      add(what + callText(call) + " delivered a wrong result, from byte " + std::to_string(at) + " of " +
          std::to_string(expected.size()));
    }
  }

  const Run& run_;
  std::vector<std::string> violations_;
  std::set<std::tuple<int, int, int>> heard_; ///< receiver, key, sender: each message is received once
};

} // namespace

std::vector<std::string> violationsOf(const Run& run) {
  return Checks(run).take();
}

uint64_t digestOf(const Run& run) {
  Digest digest;
  const auto add = [&](const std::optional<ErrorRecord>& error, TimePoint at) {
    digest.addNumber(static_cast<uint64_t>(at.time_since_epoch().count()));
    if (error) {
      digest.add(*error);
    }
  };
  digest.addNumber(run.audit().digest());
  for (int rank = 0; rank < run.plan().size; ++rank) {
    const RankState& state = run.ranks()[static_cast<size_t>(rank)];
    add(state.group->failure(), state.group->failedAt());
    for (const auto& outcome : state.user->outcomes()) {
      digest.add(outcome->descriptor);
      digest.addNumber(outcome->name);
      digest.addNumber(static_cast<uint64_t>(outcome->sender));
      const std::vector<std::byte> input = inputOf(outcome->call, rank);
      digest.addBytes(input.data(), input.size());
      digest.addBytes(outcome->output.data(), outcome->output.size());
      add(outcome->error, outcome->ended);
    }
  }
  return digest.value();
}

namespace {

/// What one run has done, added to the rest of its report.
void add(Report& report, const Run& run) {
  for (const RankState& state : run.ranks()) {
    report.group_failed = report.group_failed || state.group->failure().has_value();
    for (const auto& outcome : state.user->outcomes()) {
      ++report.operations;
      report.succeeded += outcome->ended != TimePoint::max() && !outcome->error ? 1 : 0;
    }
  }
  report.frames += run.audit().frames();
  report.events = run.events();
  report.elapsed = run.elapsed();
  report.fingerprint = mix64(report.fingerprint) ^ digestOf(run);
}

std::string nameOf(const std::vector<FaultRecord>& faults) {
  return faults.empty() ? "none" : faults.size() > 1 ? "several" : faultName(faults[0].plan.kind);
}

Report simulateGroups(uint64_t seed, bool keeps_trace) {
  Cluster cluster(makeClusterPlan(seed), keeps_trace);
  cluster.execute();
  Report report;
  report.seed = seed;
  report.plan = cluster.plan().text();
  report.first_fault = "none";
  for (size_t i = 0; i < cluster.runs().size(); ++i) {
    const Run& run = *cluster.runs()[i];
    const std::string group = "group " + std::to_string(i) + ": ";
    for (const std::string& violation : violationsOf(run)) {
      report.violations.push_back(group + violation);
    }
    for (const std::string& line : run.audit().trace()) {
      report.trace.push_back(line.substr(0, WireAudit::kTimeNchars) + group + line.substr(WireAudit::kTimeNchars));
    }
    // A fault of the host has struck each group; the report names the group for which it was drawn.
    if (!cluster.plan().groups[i].plan.faults.empty()) {
      report.first_fault = nameOf(run.faults());
    }
    add(report, run);
  }
  std::stable_sort(report.trace.begin(), report.trace.end(), [](const std::string& a, const std::string& b) {
    return a.compare(0, WireAudit::kTimeNchars, b, 0, WireAudit::kTimeNchars) < 0;
  });
  return report;
}

} // namespace

Report simulate(uint64_t seed, bool keeps_trace) {
  if (seed >= kGroupSeeds) {
    return simulateGroups(seed, keeps_trace);
  }
  Run run(makePlan(seed), keeps_trace);
  run.execute();
  Report report;
  report.seed = seed;
  report.violations = violationsOf(run);
  report.trace = run.audit().trace();
  report.plan = run.plan().text();
  report.first_fault = nameOf(run.faults());
  add(report, run);
  return report;
}

} // namespace pycomm::sim
