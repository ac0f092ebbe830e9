#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "base/deadline.h"
#include "elastic/message.h"
#include "elastic/proposal.h"

namespace pycomm::elastic {

/// How the survivors of an epoch agree on the members of the next one, and on whether the step that was under way counts. One object per
/// process and group, for all of its epochs. Without I/O, without a clock and without threads: events in, actions out.
///
/// Each epoch decides one view, the next: single-decree consensus (Lamport's synod) among the members, in memory. An epoch ends when a
/// member is suspected, or when all stop after a commit because somebody leaves or joins:
///
///   SUSPECT    floods. Each member seals: no operation of the epoch ends well there any more. It pings all others.
///   PREPARE    the lowest member that is not suspected asks for promises.
///   PROMISE    once sealed: how far its step is, who answered its pings, and what it has accepted.
///   ACCEPT     the proposer asks to accept a view that a quorum's promises allow (chooseNext()).
///   DECIDE     a quorum has accepted it. Floods.
///
/// Quorum: more than half of the members' votes, where the lowest-ranked member breaks a tie. A member whose process has ended, as the
/// kernel says, is not counted, if what it had accepted is known: it keeps that where the processes of its host can read it (Record).
/// Without that, two ranks of one host could continue one after the other: A while B is stopped, then B when A has finished.
///
/// The order of actions matters: a Record is kept before the messages behind it are sent.
class Agreement {
 public:
  struct Config {
    Incarnation self;
    size_t min_ranks =
        1; ///< with fewer members no step begins; a step that all members have finished is committed all the same
    bool accept_split_brain = false; ///< go on without a quorum: both sides of a partition may
    int dead_after_ms = kOneTryMs; ///< the detector's: silence for so long is PEER_UNRESPONSIVE
    int quorum_wait_ms =
        10000; ///< how long to wait for min_ranks, or a quorum (see kMostQuorumWaits), before the user gets an error
    int join_pause_ms = 10000; ///< how long members wait after a commit for a newcomer that loads their state
    int join_wait_ms = 60000; ///< how long a newcomer waits to be admitted
    int retry_ms = 200; ///< after which messages are sent again, and twice as long from then on
  };

  /// A quorum that answers, and has not agreed after quorum_wait, gets so many times that; or longer if a member may be silent for longer.
  static constexpr int kMostQuorumWaits = 3;
  [[nodiscard]] std::chrono::milliseconds longestWait() const noexcept {
    const std::chrono::milliseconds once(config_.quorum_wait_ms);
    return std::max(kMostQuorumWaits * once, 2 * std::chrono::milliseconds(config_.dead_after_ms) + once);
  }

  struct Action {
    enum class Kind {
      Send, ///< `message` to each of `to`
      Keep, ///< write `record` where processes of this host can read it after the end of this one
      Seal, ///< fail all operations of the epoch, and call sealed() when that is done
      Install, ///< the epoch of `view` begins
      Link, ///< connect to the newcomer `of`, and call linked()
      Raise, ///< nothing more happens here: `error`
    };
    enum class Error {
      QuorumLost, ///< no quorum; `missing` did not answer, or fell silent
      TooFew, ///< fewer members than min_ranks
      LeftBehind, ///< the others continue without this process, in `view`; a newcomer had been a member without knowing
      Left, ///< not an error: it has left in order
      NotAdmitted, ///< the newcomer was not admitted in time
    };
    Kind kind = Kind::Send;
    std::vector<Incarnation> to;
    std::shared_ptr<const Message> message;
    std::shared_ptr<const Record> record;
    View view;
    Incarnation of;
    ErrorCode cause = ErrorCode::Ok; ///< of a seal: why the epoch is over
    std::optional<Incarnation> culprit; ///< and of whom, if that is known
    Error error = Error::QuorumLost;
    std::vector<Incarnation> missing;
    bool in_reach = false; ///< of QuorumLost: the others that answer are a quorum, and have not agreed
  };

  /// Of a founding member: the first view is the same on all of them.
  Agreement(const Config& config, const View& first, TimePoint now);
  /// Of a newcomer, which asks these members to admit it. It founds no group.
  Agreement(const Config& config, std::vector<Incarnation> contacts, TimePoint now);

  // ---- events

  void received(const Message& message, TimePoint now);
  /// The failure detector's word. Only PEER_DEAD, PEER_UNRESPONSIVE, PEER_LEFT and CONN_RESET change members; all other causes
  /// are no event here.
  void failed(ErrorCode code, const Incarnation& peer, TimePoint now);
  /// The kernel says that all threads of that process have ended, and this is what it has kept. An end of its connections proves nothing. Also
  /// of a newcomer: the next view may have it.
  void certified(const Incarnation& peer, const Record& record, TimePoint now);
  /// How far this process is. Called on every change, and before sealed().
  void step(const StepState& state);
  /// Nothing of the epoch ends well here any more.
  void sealed(TimePoint now);
  /// The commit round that has ended says that somebody leaves or joins: see StepLedger::commit(). Without `admits` newcomers are not waited for.
  void boundary(TimePoint now, bool admits = true);
  /// This process has finished its last step, or committed it, and leaves with that: it is not in the next view. If that sums the step again,
  /// it is, and leaves with that.
  void leave() noexcept {
    leaving_ = true;
  }
  /// This process will call close(): until then it helps the others to a quorum, and is in no next view. Else it might decide one in which
  /// only itself is left, as the others suspect it already.
  void retire() noexcept {
    raised_ = true;
  }
  /// This process leaves at once, and says so.
  void close(TimePoint now);
  /// The newcomer can be reached from here.
  void linked(const Incarnation& newcomer, TimePoint now);
  /// This newcomer holds all that members of the view with this id held after their step `committed`: their parameters, and what the
  /// members are called. Of no use in another view.
  void loaded(int64_t committed, uint64_t view, TimePoint now);
  /// Whether the program of this process waits for its step to begin. If it is rank 0's, it gives newcomers no state then, and members that are too
  /// few for a step have no more time because of them.
  void awaitStep(bool waits) noexcept {
    awaits_step_ = waits;
  }
  void tick(TimePoint now);

  // ---- state

  [[nodiscard]] TimePoint nextTick() const noexcept;
  [[nodiscard]] std::vector<Action> takeActions();
  [[nodiscard]] const View& view() const noexcept {
    return view_;
  }
  /// Whether the step may begin, or be summed again.
  [[nodiscard]] bool mayBegin() const noexcept {
    return phase_ == Phase::Working && view_.members.size() >= config_.min_ranks;
  }
  /// Whether the next view is being decided. Until it is, a member that takes part sends each other one something at least every half of dead_after.
  [[nodiscard]] bool isAgreeing() const noexcept {
    return phase_ == Phase::Agreeing;
  }
  /// Whether some newcomer can be reached from here. If all members say so in a commit round, they stop for it at a later one.
  [[nodiscard]] bool admits() const noexcept;
  /// Newcomers that load the members' state while those wait: in boundary(), or too few for a step. In the first case not those that can be reached only since then, as nobody gives them
  /// the state any more.
  [[nodiscard]] std::vector<Incarnation> loading() const {
    return newcomers(false);
  }
  /// Those that hold it already.
  [[nodiscard]] std::vector<Incarnation> holding() const {
    return newcomers(true);
  }
  /// How long the members wait for them behind a commit.
  [[nodiscard]] std::optional<TimePoint> pauseUntil() const {
    return phase_ == Phase::Pausing ? std::optional(pause_until_) : std::nullopt;
  }
  /// Of a newcomer: whom it asks to admit it.
  [[nodiscard]] const std::vector<Incarnation>& contacts() const noexcept {
    return contacts_;
  }
  void setContacts(std::vector<Incarnation> contacts) noexcept {
    contacts_ = std::move(contacts);
  }

  [[nodiscard]] static bool changesMembers(ErrorCode code) noexcept;
  /// A digest of all of its state, with times relative to the last event: two objects that have the same one do the same from here on.
  [[nodiscard]] uint64_t digest() const;

 private:
  enum class Phase {
    Joining, ///< no member yet
    Working, ///< the epoch goes on
    Pausing, ///< after a commit: waits for newcomers to load
    Agreeing, ///< the epoch is over, the next is not decided
    Over, ///< no member any more
  };
  /// A voter that accepts nothing any more.
  struct Gone {
    uint64_t epoch = 0; ///< its last, which is no later than this process's
    std::optional<Accepted> accepted; ///< in that epoch
    bool left = false; ///< in order
  };
  struct Suspicion {
    ErrorCode code = ErrorCode::Ok;
    uint64_t nonce = 0; ///< a pong for a later one disproves it
  };
  struct Newcomer {
    bool linked = false;
    bool awaited = false; ///< it was there when the members stopped, or were too few
    int64_t loaded = -1; ///< the step of this view whose state it holds
    TimePoint not_before; ///< it was passed over: no members stop for it before
    TimePoint::duration back_off{};
  };

  /// Each event begins with this: a process that was stopped does not count that time.
  void awake(TimePoint now);
  /// Each event ends with this: messages to itself, and all that was only waiting for the event.
  void settle(TimePoint now);
  void receivedByMember(const Message& message, TimePoint now);
  void receivedByNewcomer(const Message& message, TimePoint now);
  void answerOld(const Message& message);
  void begin(ErrorCode cause, const std::optional<Incarnation>& culprit, TimePoint now);
  void ask(TimePoint now);
  /// Says that nothing of that member arrives here: it cannot know, and the others need not wait for it.
  void accuse(const Incarnation& member, std::vector<Incarnation> to);
  void propose(TimePoint now);
  /// The one before has failed.
  void proposeIfLowest(TimePoint now);
  /// Promises a ballot that is no smaller than the promised one; refuses another one, and says so to its sender.
  [[nodiscard]] bool raisePromise(const Message& message);
  void onPrepare(const Message& message, TimePoint now);
  void onPromise(const Message& message);
  void onAccept(const Message& message);
  void onAccepted(const Message& message);
  void onRefuse(const Message& message, TimePoint now);
  void onJoin(const Message& message);
  void merge(const std::vector<Testament>& testaments);
  void promiseWhenReady(TimePoint now);
  void beginIfChangeIsReady(TimePoint now);
  void advance(TimePoint now);
  void choose(TimePoint now);
  void learn(const View& next, TimePoint now);
  void install(const View& next, TimePoint now);
  void raise(Action::Error error, const View* where = nullptr);
  [[nodiscard]] Message goodbye() const;
  void farewell();
  /// Nothing of its last step is under way.
  [[nodiscard]] bool leavesInOrder() const noexcept {
    return leaving_ && !step_.launched;
  }

  [[nodiscard]] Message make(Message::Kind kind) const;
  void send(Message message, std::vector<Incarnation> to);
  void keep();
  /// All members but this one and those that have ended; with newcomers, those that have loaded as well.
  [[nodiscard]] std::vector<Incarnation> others(bool with_newcomers = false) const;
  [[nodiscard]] std::map<int, std::optional<Accepted>> dead() const;
  [[nodiscard]] std::vector<Testament> testaments(const MemberSet& of = MemberSet().set()) const;
  [[nodiscard]] MemberSet deadSet() const;
  /// Whether this member has not answered since the epoch ended, or is suspected by now.
  [[nodiscard]] bool isMissing(const Incarnation& member) const;
  /// Whether this process and the members that answer are a quorum.
  [[nodiscard]] bool reachesQuorum() const;
  [[nodiscard]] TimePoint giveUpAt() const;
  /// Whether this member's ballot cannot be the one that this process promises.
  [[nodiscard]] bool cannotLead(const Incarnation& member) const;
  [[nodiscard]] bool isLowest() const;
  [[nodiscard]] bool suspectedHard(const Incarnation& member) const;
  [[nodiscard]] bool isRumoured(
      const Incarnation& member) const { ///< another one finds it silent, and this process does not know better
    return rumours_.count(member) != 0 && !reached(member);
  }
  /// Whether this member or newcomer has answered a ping since the epoch ended.
  [[nodiscard]] bool reached(const Incarnation& other) const;
  /// Until when to wait for an answer that was asked for at `since`. `spare`: beyond the longest pause that costs nobody its place.
  [[nodiscard]] TimePoint patience(const Incarnation& of, TimePoint since, TimePoint::duration spare) const;
  [[nodiscard]] TimePoint promiseAt() const;
  [[nodiscard]] TimePoint chooseAt() const;
  [[nodiscard]] TimePoint takeoverAt(TimePoint now) const;
  [[nodiscard]] bool tooFew() const noexcept {
    return view_.members.size() < config_.min_ranks;
  }
  /// When they raise. A newcomer that waits for the state then has so much time as in a pause. Rank 0 alone knows whether it gets that, and begins
  /// the agreement that admits: so the others ask it from their own time on, and raise with its Goodbye, or when it is silent.
  [[nodiscard]] TimePoint tooFewAt() const noexcept;
  /// Whether the members wait for newcomers.
  [[nodiscard]] bool isIdle() const noexcept;
  [[nodiscard]] bool awaitsState() const noexcept; ///< of one of them
  [[nodiscard]] std::vector<Incarnation> newcomers(bool hold) const;
  /// Whether one more may be known. All members keep the same ones, the smallest, else none would be known to all.
  [[nodiscard]] bool makesRoomFor(const Incarnation& newcomer);
  [[nodiscard]] bool mayAdmit(const Newcomer& newcomer) const noexcept {
    return newcomer.linked && now_ >= newcomer.not_before;
  }
  /// Whether members that may not begin a step wait for its state to arrive.
  [[nodiscard]] bool loads(const Newcomer& newcomer) const noexcept {
    return (phase_ == Phase::Pausing ? newcomer.awaited : mayAdmit(newcomer)) && !hasLoaded(newcomer);
  }
  [[nodiscard]] bool hasLoaded(const Newcomer& newcomer) const noexcept {
    return newcomer.linked && newcomer.loaded == step_.committed;
  }
  [[nodiscard]] TimePoint::duration window() const noexcept {
    return std::chrono::milliseconds(config_.dead_after_ms / 4);
  }

  const Config config_;
  Phase phase_ = Phase::Working;
  View view_;
  uint64_t view_id_ = 0;
  int self_ = -1; ///< position in view_
  std::deque<View> past_; ///< before view_, oldest first
  StepState step_;
  bool awaits_step_ = false;
  bool leaving_ = false;
  bool raised_ = false;
  std::map<Incarnation, Suspicion> suspects_;
  std::set<Incarnation> rumours_; ///< whom others suspect, in this epoch
  std::set<Incarnation> deaf_; ///< who suspect this process, in this epoch: nothing of it arrives there
  std::map<Incarnation, int> resets_; ///< of connections, since the last commit
  std::map<Incarnation, Gone> gone_;
  std::map<Incarnation, Newcomer> newcomers_;
  std::vector<Incarnation> contacts_; ///< of a newcomer
  int64_t loaded_ = -1; ///< of a newcomer: the step whose state it holds
  uint64_t loaded_view_ = 0; ///< and the view
  uint64_t asked_view_ = 0; ///< of a newcomer: the view that would admit it
  TimePoint asked_at_ = TimePoint::max(); ///< and when that asked first

  // Of this epoch's agreement.
  ErrorCode cause_ = ErrorCode::Ok;
  std::optional<Incarnation> culprit_;
  bool sealed_ = false;
  TimePoint began_;
  TimePoint propose_at_ = TimePoint::max();
  TimePoint retry_at_ = TimePoint::max();
  TimePoint::duration retry_after_{};
  uint64_t nonce_ = 0;
  MemberSet reach_;
  std::vector<Incarnation> newcomers_reached_;
  std::vector<Incarnation> fellows_; ///< of a newcomer: others that may be admitted with it
  Ballot promised_;
  std::optional<Accepted> accepted_;
  std::optional<Incarnation> owed_; ///< to whom a promise of `promised_`, which waits for the seal and for pongs
  uint32_t round_ = 0; ///< of the greatest ballot seen
  std::optional<Proposal> proposal_;
  TimePoint pause_until_ = TimePoint::max();
  TimePoint too_few_until_ = TimePoint::max(); ///< or when rank 0 has answered since, or the view has changed after it

  TimePoint now_; ///< of the last event
  std::deque<Message> own_; ///< to itself
  std::vector<Action> actions_;
};

} // namespace pycomm::elastic
