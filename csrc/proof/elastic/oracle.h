#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "elastic/agreement.h"
#include "proof/elastic/plan.h"

namespace pycomm::elastic::sim {

/// Knows the truth about a simulated world, and checks the promises of docs/evidence/agreement.md at every event. It counts votes and steps in its
/// own way.
class Oracle {
 public:
  explicit Oracle(const Plan& plan) : plan_(plan) {}

  // ---- what happens; p is a process, by number
  void ended(int p) {
    ended_.insert(p);
  }
  void saidGoodbye(int p) {
    goodbye_.insert(p);
  }
  void certificate(int to, int of) {
    certified_[of].insert(to);
  }
  void newcomer() {
    ++newcomers_;
  }
  /// A newcomer holds all that members held after that step.
  void loads(int p, int64_t step) {
    committed_[p] = step;
  }
  /// A cause that may change members, or a commit at which somebody leaves or joins, came to a member of this view.
  void reason(uint64_t view) {
    reasons_.insert(view);
  }
  /// The same while the view's members agree already: the next view may end because of it, too.
  void lateReason(uint64_t view);
  /// The process is to leave with this step, which it has finished.
  void leaves(int p, int64_t now_us, int64_t step, Round round);
  void cut(int from, int to, int64_t now_us);
  void healed(int from, int to);
  void started(int p, const View& first);

  // ---- what processes do
  void seals(int p, const View& view, int64_t now_us);
  void sends(int p, const Message& message);
  void keeps(int p, const Record& record);
  /// The verdict on the step that was under way is in view.step; `chain` is the digest of the process's own parameters, before.
  void installs(int p, const View& view, bool newcomer, uint64_t chain);
  /// An operation of this view has ended well: of a bucket, or the commit round.
  void endsWell(int p, uint64_t view);
  void finishes(int p, uint64_t view, int64_t step);
  /// A member enters the commit round of that step with this wish.
  void wishes(uint64_t view, int64_t step, const Wish& wish) {
    bool& all = all_admit_.try_emplace({view, step}, true).first->second;
    all = all && wish.admits;
  }
  /// Behind that step it waits for newcomers. `before_forward`: its program comes to a forward pass.
  void stops(int p, uint64_t view, int64_t step, bool before_forward);
  /// `by_round`: the commit round has ended here, of this view.
  void commits(int p, uint64_t view, int64_t step, uint64_t chain, bool by_round, const std::vector<int>& members);
  void redoes(int p, const View& view, int64_t step);
  /// A round, behind so many rounds of the program.
  void begins(int p, const View& view, int64_t step, Round round, size_t position);
  /// `connected`: some member of the newest view has been reachable for long enough to answer.
  void raises(int p, Agreement::Action::Error error, const View& view, bool connected);
  void programError(int p, bool changed);

  void violation(const std::string& what) {
    if (violations_.size() < 20) {
      violations_.push_back(what);
    }
  }
  [[nodiscard]] const std::vector<std::string>& violations() const noexcept {
    return violations_;
  }
  /// The view of the greatest epoch that any process has installed.
  [[nodiscard]] const View& newest() const noexcept {
    return newest_;
  }
  /// Whether these are a quorum of the view, as the documentation says: of those not certified to have ended, and not gone in order.
  [[nodiscard]] bool quorum(const View& view, const std::set<int>& voters) const;
  /// The same as far as these voters know: a goodbye may have been lost.
  [[nodiscard]] bool knownQuorum(const View& view, const std::set<int>& voters) const;

  [[nodiscard]] static int processOf(const Incarnation& incarnation) noexcept {
    return static_cast<int>(incarnation.low) - 1;
  }

 private:
  struct Vote {
    uint64_t next = 0;
    std::set<int> voters;
  };
  template <typename Out>
  [[nodiscard]] bool quorumOf(const View& view, const std::set<int>& voters, const Out& out) const;
  [[nodiscard]] bool unsafe() const noexcept {
    return plan_.accept_split_brain;
  }

  const Plan& plan_;
  std::set<int> ended_;
  std::set<int> goodbye_;
  std::map<int, std::set<int>> certified_; ///< by process: who knows
  int newcomers_ = 0; ///< that have started
  std::set<uint64_t> reasons_; ///< views
  std::set<uint64_t> late_reasons_;
  std::map<std::pair<int, int>, int64_t> cut_since_us_;
  std::map<uint64_t, View> views_; ///< by id
  std::map<uint64_t, int64_t> sealed_first_us_; ///< by view
  std::set<std::pair<int, uint64_t>> promised_; ///< process and view
  struct Leaves {
    int64_t at_us = 0;
    int64_t step = 0;
  };
  std::map<int, Leaves> leaves_; ///< by process
  std::map<uint64_t, std::map<uint64_t, Vote>> votes_; ///< by view and ballot
  std::map<uint64_t, uint64_t> next_of_; ///< by view: the view that was installed after it
  std::map<std::pair<uint64_t, int64_t>, std::set<int>> finished_; ///< by view and step
  std::map<std::pair<uint64_t, int64_t>, std::pair<Round, size_t>> rounds_; ///< by view and step: of the first to begin
  std::map<std::pair<uint64_t, int64_t>, bool> all_admit_; ///< by view and step
  std::map<int64_t, uint64_t> chains_; ///< by step: the digest of all parameters after it
  std::map<int64_t, uint64_t> committed_in_; ///< by step: the first epoch in which it was committed
  std::map<int, int64_t> committed_; ///< by process
  std::map<int, uint64_t> installed_; ///< by process: its view
  View newest_;
  int same_again_ = 0; ///< views in a row that were to change members, and did not
  std::vector<std::string> violations_;
};

} // namespace pycomm::elastic::sim
