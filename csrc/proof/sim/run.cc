#include "proof/sim/run.h"

#include <utility>

namespace pycomm::sim {
namespace {

SimGroup::Settings settingsOf(const Plan& plan, int rank) {
  SimGroup::Settings settings;
  GroupIdentity& identity = settings.identity;
  identity.rank = rank;
  identity.size = plan.size;
  identity.name = "sim";
  identity.hash = 0x51;
  identity.nonce = plan.seed;
  for (int i = 0; i < plan.size; ++i) {
    identity.hosts.push_back("host" + std::to_string(i));
  }
  settings.limits = plan.limits;
  settings.membership.rank = rank;
  settings.membership.hosts = identity.hosts;
  settings.membership.neighbours = controlNeighbours(rank, plan.size);
  settings.membership.group = identity.name;
  settings.data_loop_pace = plan.ranks[static_cast<size_t>(rank)].data_loop_pace;
  return settings;
}

bool isOfTheProgram(FaultKind kind) noexcept {
  return kind == FaultKind::Late || kind == FaultKind::Mismatch || kind == FaultKind::Leave || kind == FaultKind::Abort;
}

} // namespace

Run::Run(const Plan& plan, bool keeps_trace) : Run(plan, keeps_trace, Shared()) {}

Run::Run(const Plan& plan, bool keeps_trace, Shared shared)
    : plan_(plan),
      shared_(std::move(shared)),
      own_timeline_(shared_.timeline == nullptr ? std::make_unique<Timeline>() : nullptr),
      timeline_(shared_.timeline == nullptr ? own_timeline_.get() : shared_.timeline),
      random_(plan.seed ^ 0x5eed),
      network_(*timeline_, random_.fork(), plan.size, plan.weather, shared_.first_fd),
      audit_(*timeline_, plan.size, plan.limits, keeps_trace),
      ranks_(static_cast<size_t>(plan.size)) {
  network_.setObserver(&audit_);
  if (shared_.wires != nullptr) {
    shared_.wires->add(network_);
  }
  for (int rank = 0; rank < plan_.size; ++rank) {
    RankState& state = ranks_[static_cast<size_t>(rank)];
    if (shared_.processes.empty()) {
      state.own_process = std::make_unique<SimProcess>(*timeline_, network_, random_.fork());
    }
    SimProcess& process = state.own_process ? *state.own_process : *shared_.processes[static_cast<size_t>(rank)];
    state.group = std::make_unique<SimGroup>(*timeline_, network_, process, settingsOf(plan_, rank));
    state.user = std::make_unique<User>(*timeline_, *state.group, rank, plan_.ranks[static_cast<size_t>(rank)]);
    if (keeps_trace) {
      state.group->onFailure([this, rank](const ErrorRecord& cause) {
        audit_.say("rank " + std::to_string(rank) + " fails: " + cause.text());
      });
      state.user->onEvent(
          [this, rank](const std::string& what) { audit_.say("rank " + std::to_string(rank) + ' ' + what); });
    }
  }
  for (int rank = 0; rank < plan_.size; ++rank) {
    for (const int peer : controlNeighbours(rank, plan_.size)) {
      if (peer > rank) {
        auto links = network_.pair(rank, peer);
        ranks_[static_cast<size_t>(rank)].group->adopt(peer, std::move(links.first));
        ranks_[static_cast<size_t>(peer)].group->adopt(rank, std::move(links.second));
      }
    }
  }
}

Run::~Run() {
  network_.setObserver(nullptr);
}

void Run::execute() {
  begin();
  const TimePoint horizon = timeline_->now() + kHorizon;
  while (!allClosed() && timeline_->eventsRun() < kMostEvents && timeline_->step(horizon)) {
  }
}

void Run::order(const FaultPlan& fault) {
  // Connections belong to one group, but a process and its host to all groups.
  if (shared_.strike && fault.kind != FaultKind::Reset) {
    shared_.strike(fault);
  } else {
    strike(fault);
  }
}

void Run::begin() {
  std::vector<FaultPlan> by_frames;
  for (const FaultPlan& fault : plan_.faults) {
    if (isOfTheProgram(fault.kind)) {
      faults_.push_back(FaultRecord{fault, timeline_->now()});
    } else if (fault.after_frames >= 0) {
      by_frames.push_back(fault);
    } else {
      timeline_->after(fault.at, [this, fault] { order(fault); });
    }
  }
  audit_.onFrame([this, by_frames](int64_t frames) {
    for (const FaultPlan& fault : by_frames) {
      if (fault.after_frames == frames) {
        timeline_->after(Nanos(0), [this, fault] { order(fault); });
      }
    }
  });
  for (const RankState& state : ranks_) {
    state.user->begin();
  }
}

bool Run::allClosed() const {
  for (const RankState& state : ranks_) {
    if (!state.user->closed() && !state.group->dead()) {
      return false;
    }
  }
  return true;
}

void Run::strike(const FaultPlan& fault) {
  RankState& victim = ranks_[static_cast<size_t>(fault.rank)];
  if (victim.user->closed() || victim.group->dead()) {
    return;
  }
  const TimePoint until = timeline_->now() + fault.duration;
  bool strikes = true;
  switch (fault.kind) {
    case FaultKind::Kill:
      victim.group->kill();
      timeline_->at(until, [this, rank = fault.rank] { network_.closeAllOf(rank); });
      break;
    case FaultKind::Stop:
      victim.group->stop();
      victim.user->stop();
      timeline_->at(until, [this, &victim, rank = fault.rank] {
        audit_.say("rank " + std::to_string(rank) + " goes on");
        victim.group->resume();
        victim.user->resume();
      });
      break;
    case FaultKind::Sleep:
      for (RankState& state : ranks_) {
        state.group->stop();
        state.user->stop();
        // They wake one after another.
        timeline_->at(until + microseconds(random_.scaled(0, 50000)), [&state] {
          if (!state.group->dead()) {
            state.group->resume();
            state.user->resume();
          }
        });
      }
      break;
    case FaultKind::Reset:
      strikes = network_.resetConnections(fault.rank, fault.other);
      break;
    case FaultKind::BlockPair:
      network_.block(fault.rank, fault.other, until);
      network_.block(fault.other, fault.rank, until);
      break;
    case FaultKind::BlockOut:
    case FaultKind::BlockIn:
    case FaultKind::Isolate:
      for (int other = 0; other < plan_.size; ++other) {
        if (other != fault.rank && fault.kind != FaultKind::BlockIn) {
          network_.block(fault.rank, other, until);
        }
        if (other != fault.rank && fault.kind != FaultKind::BlockOut) {
          network_.block(other, fault.rank, until);
        }
      }
      break;
    case FaultKind::LeaveNow:
      victim.user->leaveNow();
      break;
    case FaultKind::Late:
    case FaultKind::Mismatch:
    case FaultKind::Leave:
    case FaultKind::Abort:
      break; // of the program
  }
  if (strikes) {
    audit_.say(std::string("fault: ") + faultName(fault.kind) + " rank " + std::to_string(fault.rank));
    faults_.push_back(FaultRecord{fault, timeline_->now()});
  }
}

} // namespace pycomm::sim
