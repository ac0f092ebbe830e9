#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "base/error.h"
#include "elastic/agreement.h"
#include "elastic/step_ledger.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "engine/join_abort.h"
#include "engine/meeting/meeting_store.h"
#include "engine/reconfigurable.h"
#include "engine/survive/kept_record.h"
#include "engine/survive/outbox.h"
#include "engine/survive/peers_file.h"

namespace pycomm {

/// Runs elastic::Agreement for one group of one process: gives it its events, and does what it decides.
///
/// Two threads, for as long as the object is open. The *agreement* thread owns the Agreement: it takes messages from the endpoint and failures
/// from the present Group, sends messages to other members' endpoints, waits for the ends of the processes of its host, and never waits for
/// anything else. The *groups* thread does what takes time, one after the other: it ends the operations of an epoch (seal), and makes the next
/// Group. So nothing here needs the program's threads, which may be busy for minutes.
///
/// A Group of an epoch is made with the epoch's number as the uuid of Reconfigurable::plan(). If that fails because a member has died, that
/// is an event of the new epoch's agreement.
///
/// Ranks. A member's rank in an epoch is its position in the View of that epoch; a Group, and the errors of it, use that of their own epoch. The
/// agreement's thread reads agreement_->view(); all others read view_, which follows when act() installs it. A member's *number*, which
/// is its rank in the first epoch or comes as it joins, never changes: users know it by that. Across epochs a member is named by its Incarnation only.
///
/// What a training thread may call is marked. Those throw the error that ended it all, again and again: Error(QuorumLost | LeftBehind) from
/// the agreement, the Group's failure if that is one of the program, Error(ShutDown) after close(), Error(Forked) in a child of fork().
class AgreementDriver final : public Engine::Maker {
 public:
  /// `self` and `dead_after_ms` are those of the Reconfigurable.
  struct Config : elastic::Agreement::Config {
    std::string description; ///< of the model and its options: newcomers must have the same
    std::string peers_path; ///< the file to which rank 0 writes the members' handles at each change; empty: none
    int join_spent_ms = 0; ///< of join_wait_ms, before a newcomer has found these members
    bool has_port = false; ///< members are found at a FixedPort: the caller has Reconfigurable::offer()
    [[nodiscard]] bool mayBeJoined() const noexcept {
      return has_port || !peers_path.empty();
    }
  };

  /// The members of the first epoch have met; the uuid is its number. Collective over them: `wait_for_all` is a barrier of theirs, which is
  /// called twice. Throws what that throws, and Error(InvalidArgument) for a negative uuid and for more than
  /// elastic::kMaxMembers, and Error(ShutDown) if the engine is shut down meanwhile. `place` outlives this.
  [[nodiscard]] static std::shared_ptr<AgreementDriver> open(
      Reconfigurable& place,
      Reconfigurable::Met first,
      const Config& config,
      const std::function<void()>& wait_for_all);
  /// Of a newcomer, which asks these members to admit it: see arrive(). Throws Error(ShutDown).
  [[nodiscard]] static std::shared_ptr<AgreementDriver> askToJoin(
      Reconfigurable& place,
      const std::vector<MemberHandle>& asked,
      const Config& config);
  /// What members that listen at one of these handles say: Config::description, and the handles of all. Asks one after the other, and returns
  /// the first answer; nullopt if none comes until the deadline. `missing`: those that did not answer, in words. Throws
  /// Error(ConfigMismatch) if they have another secret, and Error(InvalidArgument | VersionMismatch) for what is no handle.
  struct MemberList {
    std::string description;
    std::vector<MemberHandle> members;
  };
  [[nodiscard]] static std::optional<MemberList> ask(
      const std::vector<std::string>& handles,
      const Visitor& from,
      Deadline deadline,
      std::string& missing);
  /// The same of members that are found at a port. Asks each address of its hosts in turn, and none that has answered once more. Throws
  /// Error(ConfigMismatch) if none answers, and one of them has another secret or is of another job.
  [[nodiscard]] static std::optional<MemberList> ask(
      const FixedPort& at,
      const Visitor& from,
      Deadline deadline,
      std::string& missing);
  /// Closes. Never in a child of fork(): there, keep the object.
  ~AgreementDriver() override;
  AgreementDriver(const AgreementDriver&) = delete;
  AgreementDriver& operator=(const AgreementDriver&) = delete;

  /// Leaves the group: says so to the other members, ends what is under way, joins the threads. Takes less than two seconds. Any thread but
  /// the engine's.
  void close() noexcept override;

  // ---- the training thread

  /// A Group that has come together.
  struct Epoch {
    uint64_t number = 0;
    Reconfigurable::Met met;
    /// By rank: the rank that each had in the first epoch, or the number that it got when it joined.
    std::vector<int> members;
    int64_t meeting_ns = 0; ///< how long meet() took, of those after the first
    elastic::Changes changes; ///< so far, also in epochs that the training thread has not seen
  };
  /// Waits until a step may begin, or the deadline: then nullopt. From then on the step counts as launched. Throws Error(Aborted) if
  /// this rank has finished a step, and neither committed() nor verdict() has returned what became of it.
  [[nodiscard]] std::optional<Epoch> begin(Deadline deadline, elastic::Round round = elastic::Round::Step);
  /// Waits until the present members have met, also if they are too few: newcomers may wait for their state. Nothing begins. Throws as begin().
  [[nodiscard]] std::optional<Epoch> present(Deadline deadline);
  /// Begins an Admission, as begin() does a step, if one is due in this epoch; else nothing begins.
  [[nodiscard]] bool beginAdmission(uint64_t epoch);
  /// What a rank adds to the commit round.
  using Wish = elastic::Wish;
  /// All buckets of the step have ended well in this epoch. nullopt if that comes too late: the epoch is over. Throws as begin() if it is
  /// called again in the same epoch.
  [[nodiscard]] std::optional<Wish> finished(uint64_t epoch);
  /// The commit round of this epoch has ended well, with what it says of all. False if that comes too late. If somebody leaves, or it is an
  /// Admission and all admit, the epoch is over behind it, and begin() waits for the next one. In the second case all call newcomers() next.
  [[nodiscard]] bool committed(uint64_t epoch, const Wish& all);
  /// Whether all members make an Admission before their next forward pass, if they are still those of the last round.
  [[nodiscard]] bool admissionIsDue() const;
  /// After a failure in that epoch.
  struct Verdict {
    bool counts = false; ///< the step is committed
    std::optional<Epoch> again; ///< else: it is launched again in this epoch; null for an Admission, which is dropped
  };
  /// Waits until the members have agreed on the step, or the deadline: then nullopt. Only if `isOver()`, else it would wait for a failure.
  [[nodiscard]] std::optional<Verdict> verdict(uint64_t epoch, Deadline deadline);
  /// Whether the epoch has ended, or is about to, because its members change.
  [[nodiscard]] bool isOver(const Epoch& epoch) const;
  /// Steps that are committed.
  [[nodiscard]] int64_t steps() const;

  // ---- the training thread of a newcomer

  /// The members' state, of their step `step`.
  struct State {
    int64_t step = 0;
    uint64_t view = 0; ///< of which members
    std::vector<std::string> roster; ///< see Giving::roster
    std::string bytes;
  };
  /// Waits until the members' state is here, or this process is a member, or the deadline: then neither. May return several states in
  /// turn, as the members go on if they cannot admit it. Throws Error(JoinRefused | RendezvousTimeout).
  struct Arrival {
    std::optional<State> state;
    std::optional<Epoch> admitted;
  };
  [[nodiscard]] Arrival arrive(Deadline deadline);
  /// This process holds the state that arrive() has returned last.
  void loaded();

  // ---- the training thread of a member

  /// Between two steps, where newcomers may get the members' state: waits until some want it of this rank, and returns how many; or until the
  /// members are known and enough for a step, or this rank has left, or an error has ended it all: then 0. nullopt at the deadline.
  [[nodiscard]] std::optional<size_t> newcomers(Deadline deadline);
  /// Of the last newcomers(): how many members there are with all that wait, or have got the state before, in the present view.
  [[nodiscard]] size_t ranksWithNewcomers() const;
  /// Sends them this state, one after the other. Blocks for as long as the members wait (Config::join_pause_ms). Throws nothing that they
  /// do: who has not got all of it is not admitted, and gets the reason if it is the time. One is not begun for which no time is left, if it
  /// takes as long as those before: members stop for it again.
  void give(std::string_view bytes);
  /// There is no state for them, and this is why; but for the first `keep`, who wait on.
  void refuse(const std::string& why, size_t keep = 0);

  // ---- any thread

  /// Ends give() soon. Those that have not got the state yet wait for it: newcomers() counts them again.
  void stopGiving(const ErrorRecord& why);

  /// Asks to leave in order: with the next step that this rank finishes. Idempotent.
  void leave();
  /// Whether it has: its last step is committed, and begin() throws.
  [[nodiscard]] bool hasLeft() const;
  /// Whether this process is a member no more, for whatever reason; in a child of fork() it never was. Throws nothing.
  [[nodiscard]] bool hasEnded() const;

 private:
  /// What other threads hand to the agreement's.
  class Inbox;
  struct Failed {
    uint64_t epoch;
    ErrorRecord record;
    std::vector<TimePoint> heard_at; ///< by rank: Group::heardAt()
  };
  struct Sealed {
    uint64_t epoch;
  };
  struct Boundary {
    uint64_t epoch;
    bool admits;
  };
  struct NotMet {
    uint64_t epoch;
    ErrorRecord record;
  };
  /// A newcomer has introduced itself, or a member of a newcomer.
  struct Introduced {
    MemberHandle handle;
  };
  /// The groups' thread has looked for the record of a process of this host.
  struct Witnessed {
    elastic::Incarnation name;
    std::shared_ptr<Witness> witness; ///< null: there is none
  };
  struct Loaded {
    int64_t step;
    uint64_t view;
  };
  /// A newcomer did not get the state.
  struct NotGiven {
    elastic::Incarnation to;
    ErrorRecord why;
  };
  /// The members have refused this newcomer.
  struct Refused {
    std::string why;
  };
  using Event = std::variant<
      elastic::Message,
      Failed,
      Sealed,
      Boundary,
      NotMet,
      Introduced,
      Witnessed,
      State,
      Loaded,
      MemberList,
      NotGiven,
      Refused>;
  struct Member {
    MemberHandle handle;
    int number = -1; ///< in the first epoch, or the number that it got when it joined; -1: it has been no member so far
    bool links = false; ///< a newcomer's: its endpoint has not answered yet
    TimePoint heard = TimePoint::max(); ///< a newcomer's: its last Join
    TimePoint not_before; ///< a newcomer's: its Joins are passed over until then
    TimePoint::duration back_off{}; ///< after another failure
    TimePoint keep_until; ///< of one that asks no more, or has not asked yet: then it is forgotten
    TimePoint gone_at = TimePoint::max(); ///< of a former member
    bool spoke = false; ///< a member's: a message about the end of this epoch has come
    bool refused = false; ///< likewise: nobody listens at its endpoint
    TimePoint silent_at = TimePoint::max(); ///< a member's, when the epoch is over: it is found silent then
    bool asked_witness = false;
    bool ended = false; ///< its process: the kernel says so
    std::unique_ptr<Outbox> outbox;
    std::optional<Witness> witness; ///< of a process of this host that has not ended
  };
  struct Job {
    enum class Kind { Seal, Meet, FindWitness, Show, Ask } kind = Kind::Seal;
    elastic::View view;
    std::vector<std::string> handles; ///< of a meeting, by rank; of Ask, whom
    std::vector<int> members; ///< likewise: Epoch::members
    MemberHandle process; ///< of FindWitness
    State state; ///< of Show: arrive() returns it
    Reconfigurable::Met old; ///< of a seal: what is sealed; without a group if none had come together
    ErrorRecord why; ///< of a seal
  };

  AgreementDriver(Reconfigurable& place, const Config& config);
  void found(Reconfigurable::Met first);
  void seek(const std::vector<MemberHandle>& asked);
  void keepRecord();
  void findWitnesses(const Group& group);
  void start();

  // ---- the agreement's thread
  void run() noexcept;
  void handle(Event event, TimePoint now);
  void handleMissed(const NotMet& missed, TimePoint now);
  [[nodiscard]] bool isOver() const;
  void handleFailure(uint64_t epoch, const ErrorRecord& record, TimePoint now);
  void expectOthers(const Failed& failed);
  void suspectOthers(TimePoint now);
  [[nodiscard]] TimePoint silenceTick() const;
  void processEnded(const elastic::Incarnation& name, Member& member, TimePoint now);
  void act(); ///< what the event has led to
  [[nodiscard]] ErrorRecord why(ErrorCode cause, const std::optional<elastic::Incarnation>& culprit) const;
  void catchUp();
  void trace(const std::string& what) const;
  void seal(const elastic::Agreement::Action& action);
  void install(const elastic::View& view);
  void raise(const elastic::Agreement::Action& action);
  [[nodiscard]] bool isNormalEnd(const elastic::Agreement::Action& action) const;
  [[nodiscard]] elastic::Incarnation someOther() const;
  void farewell(TimePoint now);
  void wait(TimePoint until);

  // ---- the agreement's thread: newcomers (agreement_driver_join.cc)
  [[nodiscard]] elastic::Agreement::Config settings() const;
  Member& introduce(const MemberHandle& handle);
  [[nodiscard]] bool mayHear(const elastic::Message& message, TimePoint now);
  void exclude(Member& newcomer);
  void link(const elastic::Incarnation& newcomer);
  void pingNewcomer(Member& newcomer);
  void handleJoining(Event& event, TimePoint now);
  void takeRoster(State state);
  bool findWitness(Member& member); ///< Witnessed says what came of it; false: it is not looked for
  void lookAfterNewcomers(TimePoint now);
  [[nodiscard]] bool hasRoomFor(const MemberHandle& stranger, TimePoint now);
  void forgetStrangers(TimePoint now);
  [[nodiscard]] TimePoint newcomersTick() const;
  void dropNewcomer(const elastic::Incarnation& newcomer, ErrorCode why, TimePoint now);
  [[nodiscard]] std::string welcome(const elastic::View& view); ///< in words: who is new
  void announce(const elastic::View& view);
  void showNewcomers();
  [[nodiscard]] ErrorRecord notAdmitted() const;
  [[nodiscard]] ErrorRecord missedMembership(const elastic::View& now) const;
  [[nodiscard]] ErrorRecord record(ErrorCode code, const std::string& summary, const std::string& hint) const;
  [[nodiscard]] ErrorRecord hasLeftRecord() const;
  [[nodiscard]] std::vector<int> numbersOf(const elastic::View& view) const;
  /// What records and texts call the members of a view. Any thread.
  [[nodiscard]] JobRanks jobRanksOf(const elastic::View& view) const;
  [[nodiscard]] int jobRankOf(const elastic::View& view, const elastic::Incarnation& member) const {
    return jobRanksOf(view).of(view.position(member));
  }
  [[nodiscard]] std::string who(const elastic::View& view, const elastic::Incarnation& member) const;

  // ---- the groups' thread
  void runJobs() noexcept;
  void sealNow(const Job& job);
  static void endOperations(Group& group, ErrorRecord why);
  void meetNow(const Job& job);
  void findWitnessNow(const MemberHandle& process);
  void show(State state);
  void askNow(const std::vector<std::string>& handles) noexcept;
  void writePeers(const std::vector<std::string>& handles, uint64_t epoch); ///< also the thread of open()
  void closeRest();
  void closeRetired();

  // ---- any thread
  void post(Job job);
  void failWith(ErrorRecord record);
  void admitNobody(); ///< from now on
  struct Giving;
  [[nodiscard]] std::optional<ErrorRecord> giveTo(
      const MemberHandle& to,
      const Giving& giving,
      std::string_view bytes,
      const AbortToken& abort);
  [[nodiscard]] std::unique_ptr<Link> openToGive(const MemberHandle& to, Deadline deadline, const AbortToken& abort)
      const;
  void refuseOne(const MemberHandle& to, const Giving& giving, const std::string& why) const noexcept;
  using GiveOne = std::function<std::optional<ErrorRecord>(const MemberHandle&, const Giving&, const AbortToken&)>;
  void giveEach(const GiveOne& give_one);
  void stopGivingLocked(const ErrorRecord& why);
  void endGiving(const ErrorRecord& why); ///< the members change; with mutex_
  void watchFailure(const std::shared_ptr<Group>& group, uint64_t epoch) const;
  void refuseInChild() const;
  void refuseUndelivered() const; ///< with mutex_
  [[nodiscard]] bool awaitPresent(std::unique_lock<std::mutex>& lock, Deadline deadline, size_t members);
  [[nodiscard]] std::optional<ErrorRecord> whyEnded() const; ///< why no step begins here any more; with mutex_
  void launch(elastic::Round round); ///< with mutex_
  [[nodiscard]] bool arePresent(size_t members) const noexcept { ///< at least so many; with mutex_
    return !over_ && present_ && view_.members.size() >= members;
  }
  [[nodiscard]] bool mayBegin() const noexcept { ///< with mutex_
    return arePresent(config_.min_ranks);
  }
  template <typename Ready>
  [[nodiscard]] bool waitFor(std::unique_lock<std::mutex>& lock, Deadline deadline, const Ready& ready) {
    return changed_.wait_until(lock, deadline.instant(), ready);
  }

  Reconfigurable& place_;
  Engine& engine_;
  const Config config_;
  const uint32_t forks_; ///< forkCount() of the process that this belongs to
  const elastic::Incarnation self_;
  const std::shared_ptr<Inbox> inbox_;
  PeersFile peers_;
  std::map<elastic::Incarnation, int>
      job_ranks_; ///< of the first members; beside others, members are called by their places

  // The agreement thread's, once that runs:
  std::map<elastic::Incarnation, Member> members_by_name_; ///< and those that were, or want to be
  std::unique_ptr<KeptRecord> kept_; ///< null: there is no shared memory
  std::unique_ptr<elastic::Agreement> agreement_;
  TimePoint ask_again_ = TimePoint::max(); ///< of a newcomer: when it asks who the members are now
  int next_number_ = 0; ///< of the next process that becomes a member
  int states_ = 0; ///< of a newcomer: how often the members' state has come
  std::optional<ErrorRecord> why_; ///< of the event that is being handled, if this process has noticed it itself

  mutable std::mutex mutex_; ///< guards the rest, but for the threads
  std::condition_variable changed_;
  struct Giving {
    uint64_t epoch = 0;
    uint64_t view = 0; ///< id of the members' view
    size_t ranks = 0; ///< the members, `to`, and newcomers that hold the state already
    std::vector<MemberHandle> to;
    std::vector<std::string>
        roster; ///< first what the next new member is called, then of each member and newcomer its handle and number, or -1
    std::optional<TimePoint> until; ///< the members wait so long; else, too few for a step, for each one that comes
  };
  Giving waiting_; ///< newcomers that wait for the state, if this is rank 0
  Giving batch_; ///< those that newcomers() has counted, for give()
  std::set<ProcessId> tried_; ///< those of waiting_ that have got it, or did not
  bool may_give_ = false; ///< newcomers() has found some, and nothing has ended it since
  bool awaits_step_ = false; ///< the program is in begin(), or calls it again
  std::shared_ptr<AbortToken> give_abort_; ///< of the one that gets it now
  elastic::Incarnation receiver_; ///< that one
  std::optional<State> arrived_; ///< of a newcomer
  Loaded taken_{}; ///< of a newcomer: what arrive() has returned last
  elastic::StepLedger ledger_;
  elastic::View view_;
  bool over_ = false; ///< the epoch of view_ has ended: the next one is being decided
  elastic::Changes changes_; ///< so far
  std::optional<Epoch> present_; ///< of view_; nothing: its group is being made
  std::optional<ErrorRecord> error_; ///< why nothing more happens here
  std::deque<Job> jobs_;
  std::shared_ptr<JoinAbort> meeting_; ///< of the meeting under way
  int failed_meetings_ = 0; ///< in a row
  std::pair<int64_t, size_t> failed_at_; ///< of these: the steps committed, and how many members
  std::vector<Reconfigurable::Met> retired_; ///< of earlier epochs, to be closed
  int64_t begun_ = 0; ///< the step that the training thread has begun last
  bool undelivered_ = false; ///< this rank has finished it, and the training thread does not know what became of it
  bool stop_jobs_ = false;

  std::mutex close_mutex_; ///< guards closed_; held while starting and closing
  bool closed_ = false;
  std::thread agreement_thread_;
  std::thread groups_thread_;
};

} // namespace pycomm
