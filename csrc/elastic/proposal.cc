#include "elastic/proposal.h"

#include <algorithm>
#include <set>

namespace pycomm::elastic {
namespace {

/// The accepted view with the greatest ballot, or nullptr.
const Accepted* lastAccepted(const Proposal& proposal, const std::map<int, std::optional<Accepted>>& dead) {
  const Accepted* last = nullptr;
  const auto consider = [&](const std::optional<Accepted>& accepted) {
    if (accepted && (last == nullptr || last->ballot < accepted->ballot)) {
      last = &*accepted;
    }
  };
  for (const auto& [position, promise] : proposal.promises) {
    consider(promise.accepted);
  }
  for (const auto& [position, accepted] : dead) {
    if (proposal.dead.test(static_cast<size_t>(position))) {
      consider(accepted);
    }
  }
  return last;
}

/// Those whose promise says so. Without those that have ended since: they reached each other, too, and the only one that goes on may have
/// missed their answers.
std::set<int> promised(
    const Proposal& proposal,
    const std::map<int, std::optional<Accepted>>& dead,
    Message::Leaving leaving) {
  std::set<int> found;
  for (const auto& [position, promise] : proposal.promises) {
    if (promise.leaving == leaving && dead.count(position) == 0) {
      found.insert(position);
    }
  }
  return found;
}

/// Of these, members that all reach each other.
std::set<int> connected(const Proposal& proposal, std::set<int> members) {
  const auto reaches = [&](int a, int b) { return proposal.promises.at(a).reach.test(static_cast<size_t>(b)); };
  // Not also those that it does not reach: where only one of a pair has an answer, the other one may have died after it answered.
  const auto missing = [&](int of) {
    return std::count_if(members.begin(), members.end(), [&](int other) { return other != of && !reaches(other, of); });
  };
  while (!members.empty()) {
    const int worst = *std::max_element(members.begin(), members.end(), [&](int a, int b) {
      const auto of_a = missing(a);
      const auto of_b = missing(b);
      return of_a != of_b ? of_a < of_b : a < b;
    });
    if (missing(worst) == 0) {
      break;
    }
    members.erase(worst);
  }
  return members;
}

bool lists(const Message& promise, const Incarnation& newcomer) {
  return std::find(promise.newcomers.begin(), promise.newcomers.end(), newcomer) != promise.newcomers.end();
}

} // namespace

MemberSet Proposal::voters() const noexcept {
  MemberSet found = value ? accepted : MemberSet();
  if (!value) {
    for (const auto& [position, promise] : promises) {
      found.set(static_cast<size_t>(position));
    }
  }
  return found;
}

std::optional<View> chooseNext(
    const View& view,
    const Proposal& proposal,
    const std::map<int, std::optional<Accepted>>& dead,
    ErrorCode cause) {
  if (const Accepted* last = lastAccepted(proposal, dead)) {
    return last->next;
  }
  View next;
  next.epoch = view.epoch + 1;
  next.parent = view.id();
  next.cause = cause;
  next.step = view.step;
  for (const auto& [position, promise] : proposal.promises) {
    next.step = std::max(next.step, promise.step.committed);
  }
  const auto state = [&](int member) -> const StepState& { return proposal.promises.at(member).step; };
  const auto under_way = [&](int member) { return state(member).committed == next.step && state(member).launched; };
  const auto finished = [&](int member) { return state(member).committed == next.step && state(member).finished; };
  const auto all_finished = [&](const std::set<int>& of) {
    return !of.empty() && std::all_of(of.begin(), of.end(), finished);
  };
  const auto with = [](std::set<int> some, const std::set<int>& others) {
    some.insert(others.begin(), others.end());
    return some;
  };
  const std::set<int> stayers = promised(proposal, dead, Message::Leaving::No);
  const std::set<int> leavers = promised(proposal, dead, Message::Leaving::WithItsStep);
  std::set<int> members = connected(proposal, stayers);
  bool counts = all_finished(with(members, leavers));
  if (!counts && std::any_of(leavers.begin(), leavers.end(), under_way)) {
    // They stay, unless the step counts without others.
    members = connected(proposal, with(stayers, leavers));
    counts = all_finished(members);
    std::erase_if(members, [&](int member) { return counts && leavers.count(member) != 0; });
  }
  // A member that has neither committed nor finished the last committed step cannot exist, unless this file is wrong about the others.
  std::erase_if(members, [&](int member) {
    const StepState& step = state(member);
    return step.committed < next.step && !(step.committed == next.step - 1 && step.finished);
  });
  const size_t alive = view.members.size() - proposal.dead.count();
  if (members.empty() && proposal.promises.size() < alive) {
    return std::nullopt;
  }
  next.step += counts ? 1 : 0;
  next.left = proposal.left;
  for (const auto& [position, promise] : proposal.promises) {
    if (promise.leaving == Message::Leaving::WithItsStep && members.count(position) == 0 && !under_way(position)) {
      next.left.set(static_cast<size_t>(position));
    }
  }
  for (const int member : members) {
    next.members.push_back(view.members[static_cast<size_t>(member)]);
  }
  if (members.empty()) {
    return next;
  }
  for (const auto& [newcomer, promise] : proposal.newcomers) {
    const bool by_members = std::all_of(members.begin(), members.end(), [&, of = newcomer](int member) {
      return lists(proposal.promises.at(member), of);
    });
    const bool by_newcomers = std::all_of(
        next.members.begin() + static_cast<std::ptrdiff_t>(members.size()),
        next.members.end(),
        [&](const Incarnation& other) {
          return lists(promise, other) && lists(proposal.newcomers.at(other), newcomer);
        });
    if (promise.step.committed == next.step && by_members && by_newcomers && next.members.size() < kMaxMembers) {
      next.members.push_back(newcomer);
    }
  }
  return next;
}

} // namespace pycomm::elastic
