#include "proof/elastic/oracle.h"

#include <algorithm>

namespace pycomm::elastic::sim {
namespace {

std::string name(int p) {
  return "process " + std::to_string(p);
}

} // namespace

void Oracle::started(int p, const View& first) {
  views_.emplace(first.id(), first);
  newest_ = first;
  installed_[p] = first.id();
  committed_[p] = first.step;
}

void Oracle::cut(int from, int to, int64_t now_us) {
  cut_since_us_.try_emplace({from, to}, now_us);
}

void Oracle::healed(int from, int to) {
  cut_since_us_.erase({from, to});
}

void Oracle::seals(int p, const View& view, int64_t now_us) {
  sealed_first_us_.try_emplace(view.id(), now_us);
  const bool waits = view.members.size() < static_cast<size_t>(plan_.min_ranks) && newcomers_ > 0;
  if (reasons_.count(view.id()) == 0 && !waits && next_of_.count(view.id()) == 0 && !unsafe()) {
    violation("M7: " + name(p) + " ends epoch " + std::to_string(view.epoch) + " without a reason");
  }
}

void Oracle::sends(int p, const Message& message) {
  if (message.kind == Message::Kind::Goodbye) {
    goodbye_.insert(p);
    reasons_.insert(message.view);
    lateReason(message.view);
  }
  const auto view = views_.find(message.view);
  if (message.kind == Message::Kind::Promise && view != views_.end() && view->second.has(message.from)) {
    promised_.insert({p, message.view});
  }
  if (message.kind == Message::Kind::Prepare && view != views_.end()) {
    for (const Testament& testament : message.testaments) {
      const int member = processOf(view->second.members[static_cast<size_t>(testament.position)]);
      if (ended_.count(member) == 0 && goodbye_.count(member) == 0) {
        violation("M6: " + name(p) + " does not count " + name(member) + ", which lives");
      }
    }
  }
}

void Oracle::keeps(int p, const Record& record) {
  if (!record.accepted) {
    return;
  }
  Vote& vote = votes_[record.view.id()][record.accepted->ballot.number()];
  const uint64_t next = record.accepted->next.id();
  if (!vote.voters.empty() && vote.next != next) {
    violation("M1: one ballot has two values");
  }
  vote.next = next;
  if (record.view.has(Incarnation{plan_.seed, static_cast<uint64_t>(p) + 1})) {
    vote.voters.insert(p);
  }
}

template <typename Out>
bool Oracle::quorumOf(const View& view, const std::set<int>& voters, const Out& out) const {
  size_t base = 0;
  size_t count = 0;
  for (const Incarnation& member : view.members) {
    const int p = processOf(member);
    base += voters.count(p) == 0 && out(p) ? 0 : 1;
    count += voters.count(p);
  }
  const bool lowest = !view.members.empty() && voters.count(processOf(view.members[0])) != 0;
  return 2 * count > base || (2 * count == base && lowest);
}

bool Oracle::quorum(const View& view, const std::set<int>& voters) const {
  return quorumOf(view, voters, [&](int p) {
    return goodbye_.count(p) != 0 || (ended_.count(p) != 0 && certified_.count(p) != 0);
  });
}

bool Oracle::knownQuorum(const View& view, const std::set<int>& voters) const {
  return quorumOf(view, voters, [&](int p) {
    const auto known = certified_.find(p);
    return known != certified_.end() &&
        std::any_of(voters.begin(), voters.end(), [&](int voter) { return known->second.count(voter) != 0; });
  });
}

void Oracle::lateReason(uint64_t view) {
  late_reasons_.insert(view);
  if (const auto next = next_of_.find(view); next != next_of_.end()) {
    reasons_.insert(next->second);
  }
}

void Oracle::installs(int p, const View& view, bool newcomer, uint64_t chain) {
  const uint64_t id = view.id();
  installed_[p] = id;
  if (late_reasons_.count(view.parent) != 0) {
    reasons_.insert(id);
  }
  if (newcomer) {
    const auto of_all = chains_.find(view.step);
    if (!unsafe() && view.step > 0 && (of_all == chains_.end() || of_all->second != chain)) {
      violation("J1: " + name(p) + " is admitted with other parameters than the members'");
    }
  }
  if (unsafe()) {
    if (view.epoch > newest_.epoch) {
      newest_ = view;
    }
    views_.emplace(id, view);
    return;
  }
  const auto [next, first] = next_of_.try_emplace(view.parent, id);
  if (next->second != id) {
    violation("M1: " + name(p) + " installs a second view of epoch " + std::to_string(view.epoch));
  }
  if (!first) {
    return;
  }
  const auto parent = views_.find(view.parent);
  if (parent == views_.end()) {
    violation("J4: " + name(p) + " installs a view that follows none");
    return;
  }
  const View& before = parent->second;
  views_.emplace(id, view);
  if (view.epoch > newest_.epoch) {
    newest_ = view;
  }
  const auto& votes = votes_[view.parent];
  if (std::none_of(votes.begin(), votes.end(), [&](const auto& vote) {
        return vote.second.next == id && quorum(before, vote.second.voters);
      })) {
    violation("M2: no quorum has accepted what " + name(p) + " installs as epoch " + std::to_string(view.epoch));
  }
  for (const Incarnation& a : view.members) {
    for (const Incarnation& b : view.members) {
      const auto since = cut_since_us_.find({processOf(a), processOf(b)});
      if (a != b && since != cut_since_us_.end() && since->second < sealed_first_us_[view.parent]) {
        violation("M5: members " + name(processOf(a)) + " and " + name(processOf(b)) + " cannot reach each other");
      }
    }
  }
  for (const Incarnation& member : view.members) {
    const auto leaves = leaves_.find(processOf(member));
    if (leaves != leaves_.end() && leaves->second.step <= view.step &&
        leaves->second.at_us < sealed_first_us_[view.parent]) {
      violation("L1: " + name(processOf(member)) + " leaves with a step that counts, and is a member of the next view");
    }
  }
  for (const Incarnation& member : view.members) {
    const int joins = processOf(member);
    if (!before.has(member) && committed_[joins] != view.step) {
      violation(
          "J1: " + name(joins) + " is admitted after step " + std::to_string(view.step) + " with the state of step " +
          std::to_string(committed_[joins]));
    }
  }
  same_again_ = view.cause == ErrorCode::Ok && view.members == before.members ? same_again_ + 1 : 0;
  if (same_again_ > 6) {
    violation("J3: epochs begin again and again for a newcomer that is not admitted");
  }
  bool was_member = true;
  int last = -1;
  for (const Incarnation& member : view.members) {
    const int position = before.position(member);
    if ((position >= 0 && !was_member) || (position >= 0 && position < last)) {
      violation("J2: a newcomer has a lower rank than a member, or members change their order");
    }
    was_member = position >= 0;
    last = std::max(last, position);
  }
  if (!view.members.empty() && !before.has(view.members[0])) {
    violation("J2: rank 0 is a newcomer");
  }
}

void Oracle::endsWell(int p, uint64_t view) {
  if (promised_.count({p, view}) != 0) {
    violation("M3: an operation ends well on " + name(p) + " after its promise");
  }
  if (installed_[p] != view) {
    violation("M4: an operation of a view that " + name(p) + " is not in ends well there");
  }
}

void Oracle::leaves(int p, int64_t now_us, int64_t step, Round round) {
  leaves_.insert_or_assign(p, Leaves{now_us, step});
  if (round != Round::Step) {
    violation("L1: " + name(p) + " leaves with a round that is no step");
  }
}

void Oracle::stops(int p, uint64_t view, int64_t step, bool before_forward) {
  if (!before_forward) {
    violation("J3: " + name(p) + " stops for newcomers where nobody gives them the state");
  }
  if (!all_admit_[{view, step}]) {
    violation("J3: " + name(p) + " stops for a newcomer that another member does not reach");
  }
}

void Oracle::finishes(int p, uint64_t view, int64_t step) {
  finished_[{view, step}].insert(p);
}

void Oracle::commits(
    int p,
    uint64_t view,
    int64_t step,
    uint64_t chain,
    bool by_round,
    const std::vector<int>& members) {
  if (step != committed_[p] + 1) {
    violation(
        "S3: " + name(p) + " commits step " + std::to_string(step) + " after step " + std::to_string(committed_[p]));
  }
  committed_[p] = step;
  if (unsafe()) {
    return;
  }
  const auto [of_all, first] = chains_.try_emplace(step, chain);
  committed_in_.try_emplace(step, views_.at(view).epoch);
  if (of_all->second != chain) {
    violation("S1: " + name(p) + " commits step " + std::to_string(step) + " with other bits than another process");
  }
  // By the round: all members of the epoch. By a new view: those who go on.
  const std::set<int>& finished = finished_[{view, step}];
  for (const int member : members) {
    if (finished.count(member) == 0) {
      violation(
          std::string("S2: ") + name(p) + " commits step " + std::to_string(step) + (by_round ? "" : " by a view") +
          ", which " + name(member) + " has not finished");
    }
  }
  for (const Incarnation& member : newest_.members) {
    const int other = processOf(member);
    const bool counts = ended_.count(other) == 0 && installed_[other] == newest_.id();
    if (counts && newest_.has(Incarnation{plan_.seed, static_cast<uint64_t>(p) + 1}) && step > committed_[other] + 1) {
      violation("S3: " + name(p) + " is two steps ahead of " + name(other));
    }
  }
}

void Oracle::redoes(int p, const View& view, int64_t step) {
  const auto committed = committed_in_.find(step);
  if (!unsafe() && committed != committed_in_.end() && committed->second < view.epoch) {
    violation("S6: " + name(p) + " sums step " + std::to_string(step) + " again, which was committed");
  }
}

void Oracle::begins(int p, const View& view, int64_t step, Round round, size_t position) {
  const auto [first, is_first] = rounds_.try_emplace({view.id(), step}, round, position);
  if (!is_first && first->second != std::pair(round, position) && !unsafe()) {
    violation("R1: " + name(p) + " makes another round than the other members of its epoch");
  }
  if (view.members.size() < static_cast<size_t>(plan_.min_ranks)) {
    violation("M2: " + name(p) + " begins a step with fewer members than min_ranks");
  }
}

void Oracle::raises(int p, Agreement::Action::Error error, const View& view, bool connected) {
  using Error = Agreement::Action::Error;
  if (error == Error::TooFew && installed_[p] != view.id()) {
    violation("S8: " + name(p) + " raises for want of members before it has committed what was decided");
  }
  if (error == Error::Left && leaves_.count(p) == 0) {
    violation("L1: " + name(p) + " leaves without being asked to");
  }
  if (error == Error::LeftBehind && view.has(Incarnation{plan_.seed, static_cast<uint64_t>(p) + 1})) {
    violation("M4: " + name(p) + " is left behind although it is a member");
  }
  if (error == Error::QuorumLost && connected && !newest_.has(Incarnation{plan_.seed, static_cast<uint64_t>(p) + 1})) {
    violation("M4: nobody has told " + name(p) + " that it is excluded");
  }
}

void Oracle::programError(int p, bool changed) {
  if (changed) {
    violation("M7: a program's error changes the members on " + name(p));
  }
}

} // namespace pycomm::elastic::sim
