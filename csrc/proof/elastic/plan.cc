#include "proof/elastic/plan.h"

#include <algorithm>
#include <bit>

namespace pycomm::elastic::sim {
namespace {

using pycomm::sim::Random;

const char* nameOf(Fault::Kind kind) {
  switch (kind) {
    case Fault::Kind::Kill:
      return "kill";
    case Fault::Kind::Stop:
      return "stop";
    case Fault::Kind::Cut:
      return "cut";
    case Fault::Kind::Partition:
      return "partition";
    case Fault::Kind::Reset:
      return "reset";
    case Fault::Kind::FalseEnd:
      return "false end";
    case Fault::Kind::ProgramError:
      return "program error";
    case Fault::Kind::Leave:
      return "leave";
    case Fault::Kind::Newcomer:
      return "newcomer";
  }
  return "?";
}

Fault drawFault(const Plan& plan, Random& dice) {
  static constexpr Fault::Kind kKinds[] = {
      Fault::Kind::Kill,
      Fault::Kind::Kill,
      Fault::Kind::Kill,
      Fault::Kind::Kill,
      Fault::Kind::Stop,
      Fault::Kind::Stop,
      Fault::Kind::Cut,
      Fault::Kind::Partition,
      Fault::Kind::Reset,
      Fault::Kind::FalseEnd,
      Fault::Kind::ProgramError,
      Fault::Kind::Leave,
      Fault::Kind::Newcomer};
  Fault fault;
  fault.kind = dice.pick(kKinds);
  const int64_t whole = plan.steps * (plan.compute_us + 10 * plan.delay_us);
  fault.at_us = dice.within(0, whole);
  if (dice.chance(50)) {
    fault.after_events = dice.scaled(1, 60 * plan.processes);
  }
  fault.process = static_cast<int>(dice.below(plan.processes));
  fault.other = static_cast<int>((fault.process + 1 + dice.below(plan.processes - 1)) % plan.processes);
  fault.both = dice.chance(60);
  switch (fault.kind) {
    case Fault::Kind::Kill:
      fault.after_actions = dice.chance(50) ? static_cast<int>(dice.below(6)) : -1;
      fault.restart_us = dice.chance(40) ? dice.within(200'000, 4'000'000) : 0;
      break;
    case Fault::Kind::Stop:
      fault.lasts_us = dice.chance(40) ? dice.within(10'000, plan.dead_after_ms * 700)
                                       : dice.within(10'000, plan.dead_after_ms * 5'000);
      break;
    case Fault::Kind::Cut:
    case Fault::Kind::Partition: {
      fault.lasts_us = dice.chance(50) ? 0 : dice.within(10'000, plan.dead_after_ms * 4'000);
      const uint32_t all = (1U << plan.processes) - 1;
      fault.side = 1 + static_cast<uint32_t>(dice.below(all - 1));
      if (dice.chance(50)) { // halves, or nearly
        fault.side = 0;
        while (std::popcount(fault.side) < plan.processes / 2) {
          fault.side |= 1U << dice.below(plan.processes);
        }
      }
      break;
    }
    case Fault::Kind::ProgramError:
      fault.code = static_cast<int>(dice.below(5));
      break;
    case Fault::Kind::FalseEnd:
      if (dice.chance(60)) { // then two propose at once
        fault.process = static_cast<int>(dice.below(std::min(2, plan.processes - 1)));
        fault.other = fault.process + 1;
      }
      break;
    case Fault::Kind::Reset:
    case Fault::Kind::Leave:
    case Fault::Kind::Newcomer:
      break;
  }
  return fault;
}

const char* nameOf(Moment moment) {
  switch (moment) {
    case Moment::Any:
      return "event";
    case Moment::EntersCommit:
      return "entry into commit";
    case Moment::CommitEnds:
      return "end of commit";
    case Moment::Seals:
      return "seal";
    case Moment::Loads:
      return "load";
    case Moment::EntersAdmission:
      return "entry into an admission";
    case Moment::AdmissionEnds:
      return "end of an admission";
  }
  return "?";
}

/// Faults at the moments at which they hurt most. From a stream of its own, so that other seeds stay what they were.
void drawMoments(Plan& plan) {
  Random dice(Random(plan.seed ^ 0x6d6f6d656e74).next());
  const int64_t of_a_step = plan.processes;
  for (Fault& fault : plan.faults) {
    if (fault.after_events > 0 && dice.chance(25)) {
      fault.moment = static_cast<Moment>(dice.within(1, kMoments - 1));
      const bool of_joining = fault.moment == Moment::Loads || fault.moment == Moment::EntersAdmission ||
          fault.moment == Moment::AdmissionEnds;
      fault.after_events = dice.within(
          1,
          fault.moment == Moment::Loads ? 2
              : of_joining              ? of_a_step
                                        : of_a_step * plan.steps);
    }
  }
  // A newcomer holds a state and is passed over, since a message of it is late. Then a member dies about the next commit.
  if (dice.chance(5)) {
    plan.slow_percent = static_cast<int>(dice.within(20, 60));
    plan.compute_us = dice.within(50'000, 400'000);
    plan.steps = static_cast<int>(dice.within(3, 6));
    Fault newcomer;
    newcomer.kind = Fault::Kind::Newcomer;
    newcomer.at_us = dice.within(0, plan.compute_us);
    plan.faults.push_back(newcomer);
    Fault kill;
    kill.process = static_cast<int>(dice.below(plan.processes));
    kill.moment = Moment::EntersCommit;
    kill.after_events = dice.within(1, of_a_step * plan.steps);
    kill.at_us = 6 * plan.compute_us;
    plan.faults.push_back(kill);
  }
}

/// Rounds between steps; and trainings that are long enough for somebody to join, of which a member dies or leaves about then. A stream of
/// its own, too.
void drawProgram(Plan& plan) {
  Random dice(Random(plan.seed ^ 0x70726f6772616d).next());
  if (dice.chance(20)) {
    plan.steps = static_cast<int>(dice.within(3, 8));
    plan.compute_us = dice.within(20'000, 300'000);
    Fault newcomer;
    newcomer.kind = Fault::Kind::Newcomer;
    newcomer.at_us = dice.within(0, plan.compute_us);
    plan.faults.push_back(newcomer);
    if (dice.chance(60)) {
      Fault other;
      static constexpr Fault::Kind kKinds[] = {
          Fault::Kind::Kill, Fault::Kind::Kill, Fault::Kind::Leave, Fault::Kind::Newcomer};
      other.kind = dice.pick(kKinds);
      other.process = static_cast<int>(dice.below(plan.processes));
      static constexpr Moment kJoining[] = {
          Moment::EntersAdmission, Moment::AdmissionEnds, Moment::Loads, Moment::CommitEnds};
      other.moment = dice.pick(kJoining);
      other.after_events = dice.within(1, plan.processes * (other.moment == Moment::CommitEnds ? plan.steps : 1));
      other.at_us = 6 * plan.compute_us;
      plan.faults.push_back(other);
    }
  }
  const uint64_t means = dice.chance(60) ? dice.next() : 0; // behind which steps
  for (int step = 0; step < plan.steps; ++step) {
    plan.program.push_back(Round::Step);
    if ((means >> step & 1U) != 0) {
      plan.program.push_back(Round::BetweenSteps);
    }
  }
}

} // namespace

Plan drawPlan(uint64_t seed) {
  Random dice(Random(seed).next()); // the streams of neighbouring seeds are parts of one
  Plan plan;
  plan.seed = seed;
  static constexpr int kSizes[] = {2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 7, 8};
  plan.processes = dice.pick(kSizes);
  const int hosts = dice.chance(35) ? 1 : static_cast<int>(dice.within(1, plan.processes));
  for (int i = 0; i < plan.processes; ++i) {
    plan.hosts.push_back(static_cast<int>(dice.below(hosts)));
  }
  plan.steps = static_cast<int>(dice.within(1, 5));
  plan.buckets = static_cast<int>(dice.within(1, 3));
  plan.min_ranks = dice.chance(70) ? 1 : static_cast<int>(dice.within(1, plan.processes));
  plan.accept_split_brain = dice.chance(4);
  plan.certifies = dice.chance(75);
  plan.certificate_us = dice.chance(60) ? 20'000 : dice.scaled(100'000, 2'000'000);
  plan.fifo = dice.chance(70);
  plan.lossy = dice.chance(50);
  plan.through_wire = dice.chance(10);
  plan.slow_percent = dice.chance(20) ? static_cast<int>(dice.within(5, 40)) : 1;
  plan.delay_us = dice.scaled(10, 3'000);
  plan.compute_us = dice.scaled(500, 200'000);
  // Most seeds have one or two faults: what breaks then is easiest to read. Some have many.
  const int faults = dice.chance(8) ? 0
      : dice.chance(60)             ? static_cast<int>(dice.within(1, 2))
                                    : static_cast<int>(dice.within(3, 6));
  for (int i = 0; i < faults; ++i) {
    plan.faults.push_back(drawFault(plan, dice));
  }
  drawMoments(plan);
  drawProgram(plan);
  return plan;
}

std::string Plan::text() const {
  std::string out = "seed " + std::to_string(seed) + ": " + std::to_string(processes) + " processes on hosts";
  for (const int host : hosts) {
    out += " " + std::to_string(host);
  }
  out += ", rounds ";
  for (const Round round : program) {
    out += round == Round::Step ? "S" : "m";
  }
  out += " of " + std::to_string(buckets) + " buckets per step, min_ranks " + std::to_string(min_ranks) +
      (accept_split_brain ? ", accepts split brain" : "") + (certifies ? "" : ", no certificates") +
      (fifo ? "" : ", not in order") + (lossy ? ", cuts lose" : "") + ", delay " + std::to_string(delay_us) +
      " us, compute " + std::to_string(compute_us) + " us\n";
  for (const Fault& fault : faults) {
    out += std::string("  ") + nameOf(fault.kind) + " process " + std::to_string(fault.process);
    if (fault.kind == Fault::Kind::Cut || fault.kind == Fault::Kind::Reset || fault.kind == Fault::Kind::FalseEnd) {
      out += " other " + std::to_string(fault.other);
    }
    if (fault.kind == Fault::Kind::Partition) {
      out += " side";
      for (int i = 0; i < processes; ++i) {
        out += (fault.side >> i & 1U) != 0 ? " " + std::to_string(i) : "";
      }
    }
    out += fault.both ? "" : " one way";
    out += fault.after_events > 0
        ? std::string(" after ") + nameOf(fault.moment) + " " + std::to_string(fault.after_events)
        : " at " + std::to_string(fault.at_us) + " us";
    out += fault.after_actions >= 0 ? ", after " + std::to_string(fault.after_actions) + " actions" : "";
    out += fault.lasts_us > 0 ? " for " + std::to_string(fault.lasts_us) + " us" : "";
    out += fault.restart_us > 0 ? ", restarts after " + std::to_string(fault.restart_us) + " us" : "";
    out += "\n";
  }
  return out;
}

} // namespace pycomm::elastic::sim
