#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "c10d/backend.h"
#include "ddp/step_agreement.h"
#include "engine/survive/agreement_driver.h"

namespace pycomm {

/// The steps of one group of torch's, over a reconfigurable PycommBackend: what AgreementDriver decides on its threads is taken over here, on
/// the training thread, inside begin(), end(), awaitMembers(), admit() and pull(). Between two of these calls the backend has one Group.
///
/// What works: ranks of any number end by SIGKILL, at any moment, on one host or several; SIGSTOP for longer than dead_after; a cut network;
/// ranks leave in order; others join between two steps: join() and pull() are the newcomer's side, newcomers() and give() the members'.
class ElasticSteps final : public StepAgreement {
 public:
  /// `backend` has members (reconfigure()); collective over them. `group` is the one of that backend: its rank and size change with the
  /// members. Throws Error(InvalidArgument), and what AgreementDriver::open() does.
  ElasticSteps(
      c10::intrusive_ptr<PycommBackend> backend,
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      const AgreementDriver::Config& config);
  /// Of a newcomer. `backend` has this process as its only member so far; `asked`: members of the group, as ask() returned them.
  [[nodiscard]] static std::shared_ptr<ElasticSteps> join(
      c10::intrusive_ptr<PycommBackend> backend,
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      const std::vector<std::string>& asked,
      const AgreementDriver::Config& config);
  ~ElasticSteps() override;
  ElasticSteps(const ElasticSteps&) = delete;
  ElasticSteps& operator=(const ElasticSteps&) = delete;

  [[nodiscard]] bool begin(Round round) override;
  [[nodiscard]] bool awaitMembers() override;
  [[nodiscard]] Outcome end(const std::exception_ptr& error) override;
  [[nodiscard]] std::vector<int> members() const override {
    return present_.members;
  }
  [[nodiscard]] int64_t meetingNs() const override {
    return present_.meeting_ns;
  }
  [[nodiscard]] bool admissionIsDue() const override {
    return driver_->admissionIsDue();
  }
  [[nodiscard]] bool admit() override;
  [[nodiscard]] size_t newcomers() override;
  void joinPoint() override {
    points_ = {driver_->steps(), joinPoints() + 1};
  }
  void leave() override {
    driver_->leave();
  }
  [[nodiscard]] bool hasLeft() const override {
    return driver_->hasLeft();
  }
  [[nodiscard]] bool isOver() const override {
    return driver_->hasEnded();
  }
  [[nodiscard]] elastic::Changes changes() const override {
    return present_.changes;
  }
  void close() noexcept override;

  /// Of a newcomer: blocks until the members' state is here, and returns it; nullopt once this process is a member. After a state call
  /// loaded(), then this again. Throws what AgreementDriver::arrive() does.
  [[nodiscard]] std::optional<std::string> pull();
  void loaded() {
    driver_->loaded();
  }
  /// Steps that the members have committed.
  [[nodiscard]] int64_t steps() const {
    return driver_->steps();
  }
  /// See AgreementDriver: ranksWithNewcomers() and give().
  [[nodiscard]] size_t ranksWithNewcomers() const {
    return driver_->ranksWithNewcomers();
  }
  /// A signal handler that raises ends it, and its exception leaves this.
  void give(std::string_view bytes);
  void refuse(const std::string& why, size_t keep) {
    driver_->refuse(why, keep);
  }

 private:
  ElasticSteps(c10::intrusive_ptr<PycommBackend> backend, c10::intrusive_ptr<c10d::ProcessGroup> group);
  /// How many join_point()s this rank has passed since the last round. None behind a round behind which a process has come: that has not passed
  /// those before its place in the program, and others may have.
  [[nodiscard]] int64_t joinPoints() const {
    return points_.step == driver_->steps() && points_.step != came_at_ ? points_.passed : 0;
  }
  /// Whether it is another epoch than the present one.
  bool takeOver(const AgreementDriver::Epoch& epoch);
  /// What `waits` returns once it is not nullopt. A signal handler that raises ends the wait.
  template <typename Found, typename... More>
  [[nodiscard]] Found await(std::optional<Found> (AgreementDriver::*waits)(Deadline, More...), More... more);
  /// What status and errors call the present group: its epoch and members.
  void entitle() const;
  /// A small all_reduce: it ends nowhere before all members have entered it, and so have finished the step. Its error, if it has failed;
  /// else whether some member leaves, and whether all admit. Throws if others end a round of another kind.
  [[nodiscard]] std::optional<ErrorRecord> commitRound(
      const AgreementDriver::Wish& wish,
      AgreementDriver::Wish& agreed);
  /// One collective among the present members; `memory` is its own until it has ended. Its error, if it has failed.
  [[nodiscard]] std::optional<ErrorRecord> run(Group::Call& call, const std::shared_ptr<void>& memory) const;

  const c10::intrusive_ptr<PycommBackend> backend_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<AgreementDriver> driver_;
  AgreementDriver::Epoch present_; ///< that the backend has
  struct {
    int64_t step = 0; ///< behind which they were passed
    int64_t passed = 0;
  } points_; ///< see joinPoints()
  int64_t came_at_ =
      -1; ///< likewise: the rounds that were committed as a process became a member last; the same on all members
};

} // namespace pycomm
