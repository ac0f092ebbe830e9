#include "engine/survive/agreement_driver.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/fault_point.h"
#include "base/fork_guard.h"
#include "base/log.h"
#include "base/native_thread.h"
#include "engine/survive/agreement_inbox.h"

namespace pycomm {
namespace {

using elastic::Agreement;
using elastic::Incarnation;
using elastic::View;
using std::chrono::milliseconds;

constexpr int kQuickMeetings =
    3; // the same members meet so often with this patience; then it doubles, up to the last time
constexpr int kMostMeetings = 6;

/// `peer`: a place in the view, -1 for none.
bool blamesPeer(int peer, const View& view, int self) noexcept {
  return peer >= 0 && peer != self && static_cast<size_t>(peer) < view.members.size();
}

std::map<Incarnation, int> jobRanksIn(const Instance& first) {
  std::map<Incarnation, int> ranks;
  for (int rank = 0; rank < first.size() && !first.job().numbers().empty(); ++rank) {
    ranks.emplace(incarnationOf(first.member(rank).incarnation), first.job().of(rank));
  }
  return ranks;
}

// Of a meeting that did not come about. If another member had no memory, say, that is its own error: here it is a member that did not come.
ErrorCode asFailure(ErrorCode code, bool blames_peer) noexcept {
  switch (code) {
    case ErrorCode::RendezvousTimeout:
      return ErrorCode::PeerUnresponsive;
    case ErrorCode::ConnectFailed:
    case ErrorCode::StoreLost:
      return ErrorCode::ConnectionReset;
    case ErrorCode::ShutDown:
      return blames_peer ? ErrorCode::PeerLeft : code;
    default:
      return blames_peer && !Agreement::changesMembers(code) ? ErrorCode::ConnectionReset : code;
  }
}

} // namespace

// ---- beginning and end

std::shared_ptr<AgreementDriver> AgreementDriver::open(
    Reconfigurable& place,
    Reconfigurable::Met first,
    const Config& config,
    const std::function<void()>& wait_for_all) {
  const std::shared_ptr<Group> group = first.group;
  const auto number = static_cast<uint64_t>(first.instance->uuid());
  std::vector<std::string> handles;
  for (int rank = 0; rank < first.instance->size(); ++rank) {
    handles.push_back(first.instance->member(rank).text());
  }
  std::shared_ptr<AgreementDriver> driver(new AgreementDriver(place, config));
  driver->found(std::move(first));
  driver->engine_.add(std::weak_ptr<Maker>(driver));
  try {
    wait_for_all(); // each offers its record
    driver->findWitnesses(*group);
    driver->start();
    wait_for_all(); // each has the others' records: who dies from here on is certified
    driver->writePeers(handles, number);
    (void)driver->peers_.flush(Deadline::after(kOneStepMs)); // then the next process may join
  } catch (...) {
    driver->close();
    throw;
  }
  return driver;
}

AgreementDriver::AgreementDriver(Reconfigurable& place, const Config& config)
    : place_(place),
      engine_(place.engine()),
      config_(config),
      forks_(forkCount()),
      self_(incarnationOf(place.visitor().self.incarnation)),
      inbox_(std::make_shared<Inbox>()),
      peers_(config.peers_path, place.visitor().self.incarnation) {}

void AgreementDriver::found(Reconfigurable::Met first) {
  if (first.instance->uuid() < 0) {
    throw Error(ErrorCode::InvalidArgument, "An elastic group needs members that have met under a uuid of 0 or more.");
  }
  if (static_cast<size_t>(first.instance->size()) > elastic::kMaxMembers) {
    throw Error(
        ErrorCode::InvalidArgument,
        "An elastic group of " + std::to_string(first.instance->size()) + " ranks is too large: at most " +
            std::to_string(elastic::kMaxMembers) + " can agree.",
        "train without elastic=");
  }
  if (config_.min_ranks > static_cast<size_t>(first.instance->size())) {
    throw Error(
        ErrorCode::InvalidArgument,
        "An elastic group of " + std::to_string(first.instance->size()) +
            " ranks cannot have min_ranks=" + std::to_string(config_.min_ranks) + ": no step could begin.",
        "set a smaller min_ranks");
  }
  place_.receive(inbox_); // refuses a second agreement before that could end the group of the first
  job_ranks_ = jobRanksIn(*first.instance);
  view_.epoch = static_cast<uint64_t>(first.instance->uuid());
  for (int rank = 0; rank < first.instance->size(); ++rank) {
    const MemberHandle& handle = first.instance->member(rank);
    introduce(handle).number = next_number_++;
    view_.members.push_back(incarnationOf(handle.incarnation));
    inbox_->know({handle});
  }
  keepRecord();
  agreement_ = std::make_unique<Agreement>(settings(), view_, Clock::now());
  act(); // keeps the first record
  (void)ledger_.install(view_); // which gives it the epoch
  present_ = Epoch{view_.epoch, std::move(first), numbersOf(view_), 0, {}};
  announce(view_);
}

void AgreementDriver::keepRecord() {
  try {
    kept_ = std::make_unique<KeptRecord>(
        engine_, recordKey(place_.visitor().self.incarnation, place_.config().security.secret.get()));
  } catch (const Error& error) {
    log(LogLevel::Info, std::string("no record for the other processes of this host: ") + error.what());
  }
}

void AgreementDriver::findWitnesses(const Group& group) {
  const Secret* const secret = place_.config().security.secret.get();
  for (size_t rank = 0; rank < view_.members.size(); ++rank) {
    Member& member = members_by_name_.at(view_.members[rank]);
    if (member.outbox == nullptr || member.handle.host != place_.visitor().self.host) {
      continue;
    }
    member.asked_witness = true;
    try {
      member.witness.emplace(
          Witness::of(
              member.handle,
              group.watchName(static_cast<int>(rank)),
              recordKey(member.handle.incarnation, secret),
              Deadline::after(kOneStepMs))); // it has its record ready
    } catch (const Error& error) { // its death is noticed by its connections, and needs more than half of the members
      log(LogLevel::Info, "the end of " + member.handle.who() + " will not be certified: " + error.what());
    }
  }
}

void AgreementDriver::start() {
  const std::lock_guard<std::mutex> closing(close_mutex_);
  if (closed_) { // by Engine::shutdown(): a thread that starts now would be joined by nobody
    throw Error(record(
        ErrorCode::ShutDown,
        "pycomm was shut down while an elastic group was being made",
        "make it before the process begins to exit"));
  }
  if (present_) {
    watchFailure(present_->met.group, view_.epoch);
  }
  agreement_thread_ = startNativeThread("pycomm-agree", [this] { run(); });
  groups_thread_ = startNativeThread("pycomm-groups", [this] { runJobs(); });
}

void AgreementDriver::close() noexcept {
  if (forkCount() != forks_) {
    return;
  }
  const std::lock_guard<std::mutex> closing(close_mutex_);
  if (std::exchange(closed_, true)) {
    return;
  }
  inbox_->retire(); // before the others can notice anything
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_jobs_ = true;
  }
  const auto guarded = [](const auto& body) {
    try {
      body();
    } catch (const std::exception&) { // no memory for a task or a text: the group closes with its last owner
    }
  };
  guarded([&] {
    const ErrorRecord why = record(
        ErrorCode::ShutDown,
        "The elastic group was closed on this rank.",
        "call nothing of it after close(), or after the end of the program began");
    ErrorRecord left = why;
    left.code = ErrorCode::PeerLeft;
    std::shared_ptr<JoinAbort> meeting;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) {
        error_ = why;
      }
      stopGivingLocked(why);
      left.peer = jobRankOf(view_, self_);
      meeting = meeting_;
    }
    if (meeting != nullptr) {
      left.summary = "Rank " + std::to_string(left.peer) + " has left the elastic group.";
      meeting->abort(left);
    }
  });
  changed_.notify_all();
  guarded([&] { admitNobody(); });
  if (groups_thread_.joinable()) {
    groups_thread_.join();
  }
  peers_.close(Deadline::after(kNearlyDoneMs));
  // The group before the goodbye: what others still need of this rank, such as its part of the last commit round, has left by then.
  guarded([&] { closeRest(); });
  inbox_->stop();
  if (agreement_thread_.joinable()) {
    agreement_thread_.join();
  }
  guarded([&] { closeRest(); });
  kept_.reset(); // who has mapped it, reads it later
}

AgreementDriver::~AgreementDriver() {
  close();
}

void AgreementDriver::watchFailure(const std::shared_ptr<Group>& group, uint64_t epoch) const {
  group->whenFailed([inbox = inbox_, epoch, weak = std::weak_ptr<Group>(group)] {
    try {
      if (const std::shared_ptr<Group> failed = weak.lock()) {
        inbox->put(Failed{epoch, *failed->failure(), failed->heardAt()});
      }
    } catch (const std::exception&) { // no memory: another member says so
    }
  });
}

ErrorRecord AgreementDriver::record(ErrorCode code, const std::string& summary, const std::string& hint) const {
  ErrorRecord record;
  record.code = code;
  record.summary = summary;
  record.hint = hint;
  record.host = place_.visitor().self.host.hostname;
  record.group = place_.config().rendezvous.group_name;
  return record;
}

ErrorRecord AgreementDriver::hasLeftRecord() const {
  return record(
      ErrorCode::ShutDown,
      "This rank has left the elastic group in order, as it was asked to.",
      "end the training loop when model.elastic.left is True");
}

std::vector<int> AgreementDriver::numbersOf(const View& view) const {
  std::vector<int> ranks;
  for (const Incarnation& member : view.members) {
    ranks.push_back(members_by_name_.at(member).number);
  }
  return ranks;
}

JobRanks AgreementDriver::jobRanksOf(const View& view) const {
  std::vector<int> by_rank;
  for (const Incarnation& member : view.members) {
    const auto known = job_ranks_.find(member);
    if (known == job_ranks_.end()) {
      return {};
    }
    by_rank.push_back(known->second);
  }
  return JobRanks(std::move(by_rank));
}

std::string AgreementDriver::who(const View& view, const Incarnation& member) const {
  const auto known = members_by_name_.find(member);
  const int rank = jobRankOf(view, member);
  return (rank < 0 ? std::string("a former rank") : "rank " + std::to_string(rank)) +
      (known == members_by_name_.end() ? "" : " (" + known->second.handle.who() + ")");
}

// ---- the training thread

void AgreementDriver::refuseInChild() const {
  if (forkCount() != forks_) {
    throw Error(
        ErrorCode::Forked,
        "An elastic group cannot be used in a child of fork(): its threads and connections belong to the parent.",
        "start workers with the spawn method");
  }
}

std::optional<AgreementDriver::Epoch> AgreementDriver::begin(Deadline deadline, elastic::Round round) {
  refuseInChild();
  std::unique_lock<std::mutex> lock(mutex_);
  awaits_step_ = true;
  if (!awaitPresent(lock, deadline, config_.min_ranks)) {
    return std::nullopt;
  }
  awaits_step_ = false;
  launch(round);
  return present_;
}

std::optional<AgreementDriver::Epoch> AgreementDriver::present(Deadline deadline) {
  refuseInChild();
  std::unique_lock<std::mutex> lock(mutex_);
  return awaitPresent(lock, deadline, 1) ? present_ : std::nullopt;
}

bool AgreementDriver::beginAdmission(uint64_t epoch) {
  refuseInChild();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (view_.epoch != epoch || !ledger_.admissionIsDue()) {
    return false;
  }
  launch(elastic::Round::Admission);
  return true;
}

bool AgreementDriver::awaitPresent(std::unique_lock<std::mutex>& lock, Deadline deadline, size_t members) {
  if (!waitFor(lock, deadline, [&] { return error_ || ledger_.hasLeft() || arePresent(members); })) {
    return false;
  }
  if (const auto why = whyEnded()) {
    throw Error(*why);
  }
  refuseUndelivered();
  return true;
}

std::optional<ErrorRecord> AgreementDriver::whyEnded() const {
  if (ledger_.hasLeft()) {
    return hasLeftRecord();
  }
  if (error_) {
    return error_;
  }
  if (arePresent(0)) {
    if (auto failure = present_->met.group->failure(); failure && !Agreement::changesMembers(failure->code)) {
      return failure; // the agreement's thread reads that soon
    }
  }
  return std::nullopt;
}

void AgreementDriver::launch(elastic::Round round) {
  ledger_.launch(round);
  begun_ = ledger_.state().committed + 1;
}

// The others may commit a step that this rank has finished, whatever its program does meanwhile.
void AgreementDriver::refuseUndelivered() const {
  if (undelivered_) {
    throw Error(record(
        ErrorCode::Aborted,
        "The end of elastic step " + std::to_string(begun_) +
            " was interrupted on this rank, by a signal handler for example. So the other members may have committed a "
            "step whose averages this rank has not written.",
        "make the wrapper anew, on all ranks, from a checkpoint"));
  }
}

std::optional<AgreementDriver::Wish> AgreementDriver::finished(uint64_t epoch) {
  refuseInChild();
  PYCOMM_FAULT_POINT("survive.finished");
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ledger_.mayCommit()) {
    refuseUndelivered(); // its commit round is under way: a second one would meet no other rank's
  }
  const std::optional<Wish> wish = ledger_.finish(epoch);
  if (wish) {
    undelivered_ = true;
  }
  return wish;
}

bool AgreementDriver::committed(uint64_t epoch, const Wish& all) {
  refuseInChild();
  PYCOMM_FAULT_POINT("survive.committed");
  const std::lock_guard<std::mutex> lock(mutex_);
  using Committed = elastic::StepLedger::Committed;
  const Committed committed = ledger_.commit(epoch, all);
  if (committed == Committed::TooLate) {
    return false;
  }
  undelivered_ = false;
  if (committed != Committed::GoesOn) {
    over_ = true; // no step begins before the next view
    inbox_->put(Boundary{epoch, committed == Committed::Admits});
  }
  if (ledger_.hasLeft()) {
    admitNobody();
  }
  return true;
}

bool AgreementDriver::admissionIsDue() const {
  refuseInChild();
  const std::lock_guard<std::mutex> lock(mutex_);
  return ledger_.admissionIsDue();
}

bool AgreementDriver::isOver(const Epoch& epoch) const {
  refuseInChild();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (over_ || view_.epoch != epoch.number || ledger_.state().committed >= begun_) {
      return true;
    }
  }
  const auto failure = epoch.met.group->failure();
  return failure && Agreement::changesMembers(failure->code);
}

std::optional<AgreementDriver::Verdict> AgreementDriver::verdict(uint64_t epoch, Deadline deadline) {
  refuseInChild();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto counts = [this] { return ledger_.state().committed >= begun_; };
  const auto again = [&] {
    return view_.epoch > epoch && (mayBegin() || !ledger_.isUnderWay());
  }; // as a dropped Admission
  if (!waitFor(lock, deadline, [&] { return counts() || error_ || again(); })) {
    return std::nullopt;
  }
  if (counts()) { // also if an error comes behind it: the others have committed it
    undelivered_ = false;
    return Verdict{true, std::nullopt};
  }
  if (error_) {
    throw Error(*error_);
  }
  undelivered_ = false;
  return ledger_.isUnderWay() ? Verdict{false, present_} : Verdict{};
}

void AgreementDriver::leave() {
  refuseInChild();
  const std::lock_guard<std::mutex> lock(mutex_);
  ledger_.leave();
}

bool AgreementDriver::hasLeft() const {
  refuseInChild();
  const std::lock_guard<std::mutex> lock(mutex_);
  return ledger_.hasLeft();
}

bool AgreementDriver::hasEnded() const {
  if (forkCount() != forks_) {
    return true; // the parent's
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return whyEnded().has_value();
}

int64_t AgreementDriver::steps() const {
  refuseInChild();
  const std::lock_guard<std::mutex> lock(mutex_);
  return ledger_.state().committed;
}

void AgreementDriver::failWith(ErrorRecord record) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) { // without memory: this may be called for the want of it
      error_ = std::move(record);
    }
    stopGivingLocked(*error_);
  }
  changed_.notify_all();
  admitNobody();
}

// ---- the agreement's thread

void AgreementDriver::run() noexcept {
  try {
    for (;;) {
      Inbox::Taken taken = inbox_->take();
      if (taken.retiring) {
        agreement_->retire();
      }
      if (taken.failed) {
        catchUp();
        agreement_->close(Clock::now());
        act();
      }
      for (Event& event : taken.events) {
        catchUp();
        handle(std::move(event), Clock::now());
        act();
      }
      if (Clock::now() >= agreement_->nextTick()) {
        catchUp();
        agreement_->tick(Clock::now());
        act();
      }
      suspectOthers(Clock::now());
      lookAfterNewcomers(Clock::now());
      if (taken.stopping) {
        farewell(Clock::now());
        return;
      }
      wait(std::min({agreement_->nextTick(), silenceTick(), newcomersTick()}));
    }
  } catch (const std::exception& exception) {
    failWith(recordOf(exception, "the agreement of the elastic group cannot go on"));
  }
}

void AgreementDriver::catchUp() {
  elastic::StepState state;
  bool leaves = false;
  bool awaits_step = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    state = ledger_.state();
    leaves = ledger_.leaves();
    awaits_step = awaits_step_;
  }
  agreement_->step(state);
  agreement_->awaitStep(awaits_step);
  if (leaves) {
    agreement_->leave();
  }
}

void AgreementDriver::wait(TimePoint until) {
  std::vector<pollfd> polled = {{inbox_->fd(), POLLIN, 0}};
  std::vector<std::pair<const Incarnation*, Member*>> owners = {{nullptr, nullptr}};
  for (auto& [name, member] : members_by_name_) {
    if (member.outbox != nullptr) {
      member.outbox->advance(Clock::now());
      until = std::min(until, member.outbox->nextTick());
      if (member.links && member.outbox->hasEntered() && member.outbox->isIdle()) {
        until = TimePoint::min(); // a newcomer has answered
      }
      if (const int fd = member.outbox->fd(); fd >= 0) {
        polled.push_back({fd, member.outbox->events(), 0});
        owners.emplace_back(nullptr, nullptr);
      }
    }
    if (member.witness) {
      polled.push_back({member.witness->fd(), POLLIN, 0});
      owners.emplace_back(&name, &member);
    }
  }
  (void)::poll(polled.data(), polled.size(), Deadline::at(until).remainingMs(kLongestSleepMs));
  for (size_t i = 0; i < polled.size(); ++i) {
    if (owners[i].first != nullptr && polled[i].revents != 0) {
      processEnded(*owners[i].first, *owners[i].second, Clock::now());
    }
  }
}

// The failure of a group names one member, but a host that loses its power takes several. The group's detector ends with the failure, so
// its last look goes on here, until a message of the member comes: see handle().
void AgreementDriver::expectOthers(const Failed& failed) {
  const View& view = agreement_->view();
  for (size_t rank = 0; failed.epoch == view.epoch && rank < failed.heard_at.size(); ++rank) {
    Member& member = members_by_name_.at(view.members[rank]);
    if (view.members[rank] != self_ && failed.heard_at[rank] != TimePoint::max() && !member.spoke) {
      member.silent_at = failed.heard_at[rank] + milliseconds(place_.config().dead_after_ms);
    }
  }
}

void AgreementDriver::suspectOthers(TimePoint now) {
  std::vector<std::pair<Incarnation, ErrorCode>> found;
  for (auto& [name, member] : members_by_name_) {
    const bool counts = agreement_->view().has(name) && !member.ended;
    const bool refused = member.outbox != nullptr && member.outbox->wasRefused() && counts && !member.witness;
    if (refused && !std::exchange(member.refused, true)) {
      found.emplace_back(name, ErrorCode::PeerDead); // no certificate: a firewall can say that, too
    }
    if (now < member.silent_at) {
      continue;
    }
    const milliseconds dead_after(place_.config().dead_after_ms);
    if (now > member.silent_at + dead_after / 30) { // this process did not run meanwhile: what has come is read first
      member.silent_at = now + dead_after / 4;
      continue;
    }
    member.silent_at = TimePoint::max();
    if (counts) {
      found.emplace_back(name, ErrorCode::PeerUnresponsive);
    }
  }
  for (const auto& [name, code] : found) {
    catchUp();
    trace("suspects " + who(agreement_->view(), name) + ": " + errorCodeName(code));
    agreement_->failed(code, name, now);
    act();
  }
}

TimePoint AgreementDriver::silenceTick() const {
  TimePoint at = TimePoint::max();
  for (const auto& [name, member] : members_by_name_) {
    at = std::min(at, member.silent_at);
  }
  return at;
}

void AgreementDriver::processEnded(const Incarnation& name, Member& member, TimePoint now) {
  const std::optional<elastic::Record> kept = member.witness->record();
  member.witness.reset();
  member.ended = true;
  catchUp();
  why_ = record(
      ErrorCode::PeerDead,
      "The process of " + who(agreement_->view(), name) + " has ended.",
      "look for that rank's first error, and in its host's dmesg for the out-of-memory killer");
  why_->peer = jobRankOf(agreement_->view(), name);
  why_->peer_host = member.handle.host.hostname;
  if (kept) {
    agreement_->certified(name, *kept, now);
  } else {
    agreement_->failed(ErrorCode::PeerDead, name, now);
  }
  act();
}

Incarnation AgreementDriver::someOther() const {
  const std::vector<Incarnation>& members = agreement_->view().members;
  const auto other = std::find_if(members.begin(), members.end(), [&](const Incarnation& one) { return one != self_; });
  return other == members.end() ? self_ : *other;
}

void AgreementDriver::handle(Event event, TimePoint now) {
  if (const auto* const message = std::get_if<elastic::Message>(&event)) {
    if (!mayHear(*message, now)) {
      return;
    }
    const View& view = agreement_->view();
    trace("has message " + std::to_string(static_cast<int>(message->kind)) + " of " + who(view, message->from));
    // All members send Decide on as they learn a view: that comes late, and says nothing of how this epoch ends.
    const bool of_this_epoch = message->epoch == view.epoch && message->kind != elastic::Message::Kind::Decide;
    agreement_->received(*message, now);
    const bool of_its_end = of_this_epoch && agreement_->isAgreeing(); // too few members ask and answer before that
    if (const auto member = members_by_name_.find(message->from); of_its_end && member != members_by_name_.end()) {
      member->second.spoke = true;
      // It may stop after it has answered, and the detector of the group has ended. Or it pauses just before its next word is due.
      const bool answers = message->kind != elastic::Message::Kind::Goodbye;
      const milliseconds dead_after(place_.config().dead_after_ms);
      member->second.silent_at = answers ? now + dead_after + dead_after / 2 : TimePoint::max();
    }
  } else if (const auto* const failed = std::get_if<Failed>(&event)) {
    expectOthers(*failed);
    handleFailure(failed->epoch, failed->record, now);
  } else if (const auto* const missed = std::get_if<NotMet>(&event)) {
    handleMissed(*missed, now);
  } else if (const auto* const boundary = std::get_if<Boundary>(&event)) {
    if (boundary->epoch == agreement_->view().epoch) {
      trace("ends behind its commit");
      agreement_->boundary(now, boundary->admits);
    }
  } else if (const auto* const sealed = std::get_if<Sealed>(&event)) {
    if (sealed->epoch == agreement_->view().epoch) {
      trace("is sealed");
      agreement_->sealed(now);
    }
  } else {
    handleJoining(event, now);
  }
}

void AgreementDriver::handleMissed(const NotMet& missed, TimePoint now) {
  const View& view = agreement_->view();
  bool gives_up = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::pair<int64_t, size_t> here(ledger_.state().committed, view.members.size());
    failed_meetings_ = std::exchange(failed_at_, here) == here ? failed_meetings_ + 1 : 1;
    gives_up = failed_meetings_ >= kMostMeetings;
  }
  if (gives_up) {
    ErrorRecord error = record(
        ErrorCode::QuorumLost,
        "The members of an elastic group did not meet " + std::to_string(kMostMeetings) +
            " times in a row, although all of them answer; the last time: " + missed.record.summary,
        "look for the first error in each rank's log, and whether all hosts reach each other; restart from a checkpoint");
    error.rank = jobRankOf(view, self_);
    error.peer = missed.record.peer;
    error.peer_host = missed.record.peer_host;
    log(LogLevel::Warn, error.text());
    failWith(std::move(error));
    agreement_->close(now);
  } else if (!isOver()) {
    ErrorRecord record = missed.record;
    const int peer = jobRanksOf(view).inGroup(record.peer);
    record.code = asFailure(record.code, blamesPeer(peer, view, view.position(self_)));
    handleFailure(missed.epoch, record, now);
  }
}

bool AgreementDriver::isOver() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return over_;
}

void AgreementDriver::handleFailure(uint64_t epoch, const ErrorRecord& record, TimePoint now) {
  const View& view = agreement_->view();
  if (epoch != view.epoch) {
    return;
  }
  if (!Agreement::changesMembers(record.code)) {
    failWith(record);
    agreement_->close(now); // the others have the same error, or go on without this rank
    return;
  }
  why_ = record;
  const int place = jobRanksOf(view).inGroup(record.peer);
  if (blamesPeer(place, view, view.position(self_))) {
    const Incarnation peer = view.members[static_cast<size_t>(place)]; // a copy: the view may change
    // The end of a connection is not the end of the process, of which the kernel will say more. So its member is not given up in a hurry.
    const bool is_open = record.code == ErrorCode::PeerDead && members_by_name_.at(peer).witness;
    agreement_->failed(is_open ? ErrorCode::ConnectionReset : record.code, peer, now);
  } else if (
      !isOver()) { // the others believe that of this process, and will answer; else it is only the end of another member's seal
    why_->code = ErrorCode::ConnectionReset;
    agreement_->failed(ErrorCode::ConnectionReset, someOther(), now);
  }
}

void AgreementDriver::act() {
  for (Agreement::Action& action : agreement_->takeActions()) {
    switch (action.kind) {
      case Agreement::Action::Kind::Send: {
        const std::string bytes = encode(*action.message);
        trace(
            "sends message " + std::to_string(static_cast<int>(action.message->kind)) + " to " +
            std::to_string(action.to.size()) + " members");
        if (action.message->kind == elastic::Message::Kind::Decide &&
            PYCOMM_FAULT("survive.decide").error_number != 0) {
          break; // the network has lost it
        }
        for (const Incarnation& to : action.to) {
          if (const auto member = members_by_name_.find(to);
              member != members_by_name_.end() && member->second.outbox != nullptr) {
            member->second.outbox->push(bytes);
          }
        }
        break;
      }
      case Agreement::Action::Kind::Keep:
        if (kept_ != nullptr) {
          PYCOMM_FAULT_POINT("survive.keep");
          kept_->keep(*action.record);
        }
        break;
      case Agreement::Action::Kind::Seal:
        seal(action);
        break;
      case Agreement::Action::Kind::Install:
        install(action.view);
        break;
      case Agreement::Action::Kind::Link:
        link(action.of);
        break;
      case Agreement::Action::Kind::Raise:
        raise(action);
        break;
    }
  }
  why_.reset();
  showNewcomers();
  const std::lock_guard<std::mutex> lock(mutex_);
  ledger_.setAdmits(agreement_->admits());
}

void AgreementDriver::trace(const std::string& what) const {
  if (logEnabled(LogLevel::Trace)) {
    log(LogLevel::Trace, "epoch " + std::to_string(agreement_->view().epoch) + " " + what);
  }
}

// Why an epoch is over: as this process has noticed it, or as the agreement says, which does not always know of whom.
ErrorRecord AgreementDriver::why(ErrorCode cause, const std::optional<Incarnation>& culprit) const {
  if (why_) {
    return *why_;
  }
  const bool is_known = culprit && *culprit != self_ && agreement_->view().has(*culprit);
  ErrorRecord why = record(
      is_known && Agreement::changesMembers(cause) ? cause : ErrorCode::ConnectionReset,
      "The members of the elastic group change" +
          (is_known ? ": " + who(agreement_->view(), *culprit) + " seems to be gone." : "."),
      "");
  why.peer = is_known ? jobRankOf(agreement_->view(), *culprit) : -1;
  return why;
}

void AgreementDriver::seal(const Agreement::Action& action) {
  const ErrorRecord why = this->why(action.cause, action.culprit);
  trace("seals: " + why.summary);
  Job job;
  job.kind = Job::Kind::Seal;
  job.why = why;
  std::shared_ptr<JoinAbort> meeting;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    over_ = true;
    endGiving(why);
    job.view = view_;
    if (present_) {
      job.old = std::exchange(present_, std::nullopt)->met;
    }
    meeting = meeting_;
  }
  PYCOMM_FAULT_POINT("survive.stop_giving");
  if (meeting != nullptr) {
    meeting->abort(why); // without the lock, as it may wait for the planes of a group
  }
  post(std::move(job));
}

void AgreementDriver::install(const View& view) {
  elastic::StepLedger::Outcome outcome = elastic::StepLedger::Outcome::Nothing;
  View before;
  Job end; // of an epoch of which this process has learned only now that it is over
  end.kind = Job::Kind::Seal;
  end.why = why(view.cause, std::nullopt);
  std::shared_ptr<JoinAbort> meeting;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    before = std::exchange(view_, view);
    over_ = false;
    endGiving(end.why); // also if no seal has come before
    if (!before.members.empty()) { // a newcomer counts from its first view on
      changes_.count(before, view);
    }
    end.view = before;
    if (present_) {
      end.old = std::exchange(present_, std::nullopt)->met;
    }
    meeting = meeting_;
    outcome = ledger_.install(view);
  }
  changed_.notify_all();
  PYCOMM_FAULT_POINT("survive.install");
  if (meeting != nullptr) {
    meeting->abort(end.why);
  }
  if (end.old.group != nullptr) {
    post(std::move(end));
  }
  for (auto& [name, member] : members_by_name_) {
    member.spoke = member.refused = false; // the next group has a detector of its own
    member.silent_at = TimePoint::max();
  }
  const std::string fresh = welcome(view);
  Job meet;
  meet.kind = Job::Kind::Meet;
  meet.view = view;
  meet.members = numbersOf(view);
  for (const Incarnation& member : view.members) {
    meet.handles.push_back(members_by_name_.at(member).handle.text());
  }
  post(std::move(meet));
  for (const Incarnation& member : view.members) {
    findWitness(members_by_name_.at(member));
  }
  announce(view);

  std::string gone;
  for (size_t rank = 0; rank < before.members.size(); ++rank) {
    if (const Incarnation& member = before.members[rank]; !view.has(member)) {
      members_by_name_.at(member).gone_at = Clock::now();
      gone += (gone.empty() ? "" : ", ") + who(before, member) +
          (view.left.test(rank)                    ? ", which has left in order"
               : members_by_name_.at(member).ended ? ", whose process has ended"
                                                   : "");
    }
  }
  std::string change = gone.empty() ? "" : "without " + gone;
  if (!fresh.empty()) {
    change += (change.empty() ? "with " : ", with ") + fresh +
        (fresh.find("), ") == std::string::npos ? ", which joins" : ", which join");
  }
  if (change.empty()) {
    change = view.cause == ErrorCode::Ok ? "nobody has joined" : "a connection broke and nobody is gone";
  }
  std::string line = "elastic group " + place_.config().rendezvous.group_name + ", epoch " +
      std::to_string(view.epoch) + ": " + change +
      (view.cause == ErrorCode::Ok ? "" : std::string(" (") + errorCodeName(view.cause) + ")") + ". " +
      std::to_string(view.members.size()) + (fresh.empty() ? " of " + std::to_string(before.members.size()) : "") +
      " members go on, this one as rank " + std::to_string(view.position(self_)) + " of the group";
  switch (outcome) {
    case elastic::StepLedger::Outcome::Commit:
      line += "; all of them had finished step " + std::to_string(view.step) + ", which counts";
      break;
    case elastic::StepLedger::Outcome::Redo:
      line += "; step " + std::to_string(view.step + 1) + " is summed again";
      break;
    case elastic::StepLedger::Outcome::Nothing:
      line += "; step " + std::to_string(view.step + 1) + " is next";
      break;
  }
  log(view.cause == ErrorCode::PeerLeft || view.cause == ErrorCode::Ok ? LogLevel::Info : LogLevel::Warn, line);
}

void AgreementDriver::raise(const Agreement::Action& action) {
  const View view = agreement_->view();
  const auto list = [&](const std::vector<Incarnation>& members) {
    std::string text;
    for (const Incarnation& member : members) {
      text += (text.empty() ? "" : ", ") + who(view, member);
    }
    return text;
  };
  const std::string epoch = "epoch " + std::to_string(view.epoch);
  const std::string members = std::to_string(view.members.size()) + " members";
  ErrorRecord error;
  switch (action.error) {
    case Agreement::Action::Error::QuorumLost:
      error = record(
          ErrorCode::QuorumLost,
          action.in_reach ? "A quorum of an elastic group did not agree on its next members within " +
                  std::to_string(agreement_->longestWait().count()) + " ms: more than half of the " + members + " of " +
                  epoch + " answer" + (action.missing.empty() ? "." : "; not " + list(action.missing) + ".")
                          : "The members of an elastic group lost their quorum: of the " + members + " of " + epoch +
                  ", this rank did not reach " + list(action.missing) + " within " +
                  std::to_string(config_.quorum_wait_ms) + " ms, and it may not go on without more than half of them.",
          action.in_reach
              ? "look for the first error in each rank's log, and for ranks that are stopped; restart from a checkpoint"
              : "see whether those ranks run and this host reaches theirs; restart from a checkpoint");
      if (!action.missing.empty()) {
        error.peer = jobRankOf(view, action.missing.front());
        error.peer_host = members_by_name_.at(action.missing.front()).handle.host.hostname;
      }
      break;
    case Agreement::Action::Error::TooFew:
      error = record(
          ErrorCode::QuorumLost,
          "An elastic group has too few ranks: " + members + " are left in " + epoch + " (" + list(view.members) +
              "), and min_ranks is " + std::to_string(config_.min_ranks) + ".",
          "restart from a checkpoint with more ranks, or set a smaller min_ranks");
      break;
    case Agreement::Action::Error::LeftBehind:
      error = view.members.empty()
          ? missedMembership(action.view)
          : record(
                ErrorCode::LeftBehind,
                "The other members of an elastic group went on without this rank: it was in " + epoch + " with " +
                    list(view.members) + ", and they are in epoch " + std::to_string(action.view.epoch) +
                    ". Its process was stopped, or its network was cut, for longer than heartbeat_timeout.",
                "end this process: its parameters are those of an earlier step");
      break;
    case Agreement::Action::Error::Left: {
      error = hasLeftRecord();
      const std::lock_guard<std::mutex> lock(mutex_);
      ledger_.left(action.view);
      break;
    }
    case Agreement::Action::Error::NotAdmitted:
      error = notAdmitted();
      break;
  }
  error.rank = jobRankOf(view, self_);
  log(isNormalEnd(action) ? LogLevel::Info : LogLevel::Warn, error.text());
  failWith(std::move(error));
}

// This rank has left in order, or the others have and no step is under way: begin() says so, if this rank wants one more.
bool AgreementDriver::isNormalEnd(const Agreement::Action& action) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool others_left = view_.cause == ErrorCode::PeerLeft || view_.cause == ErrorCode::Ok;
  return ledger_.hasLeft() ||
      (action.error == Agreement::Action::Error::TooFew && others_left && !ledger_.state().launched);
}

void AgreementDriver::farewell(TimePoint now) {
  catchUp(); // whether it leaves in order
  agreement_->close(now);
  act();
  const TimePoint end = now + milliseconds(kNearlyDoneMs);
  for (auto& [name, member] : members_by_name_) {
    member.witness.reset();
  }
  const auto busy = [](const auto& entry) { return entry.second.outbox != nullptr && !entry.second.outbox->isIdle(); };
  while (Clock::now() < end) {
    wait(end); // it sends
    if (std::none_of(members_by_name_.begin(), members_by_name_.end(), busy)) {
      return;
    }
    (void)inbox_->take();
  }
}

// ---- the groups' thread

void AgreementDriver::post(Job job) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  changed_.notify_all();
}

void AgreementDriver::runJobs() noexcept {
  for (;;) {
    Job job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stop_jobs_ || !jobs_.empty(); });
      if (jobs_.empty()) {
        return;
      }
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    try {
      switch (job.kind) {
        case Job::Kind::Seal:
          sealNow(job);
          break;
        case Job::Kind::Meet:
          meetNow(job);
          break;
        case Job::Kind::FindWitness:
          findWitnessNow(job.process);
          break;
        case Job::Kind::Show:
          show(std::move(job.state));
          break;
        case Job::Kind::Ask:
          askNow(job.handles);
          break;
      }
    } catch (const std::exception& exception) {
      failWith(recordOf(exception, "the next epoch of the elastic group cannot begin"));
      inbox_->fail(); // in whatever epoch: the others need not wait for this member
    }
  }
}

void AgreementDriver::sealNow(const Job& job) {
  PYCOMM_FAULT_POINT("survive.seal");
  if (job.old.group != nullptr) {
    endOperations(*job.old.group, job.why);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (job.old.group != nullptr) {
      retired_.push_back(job.old);
    }
    if (view_.epoch == job.view.epoch) {
      (void)ledger_.seal();
    }
  }
  PYCOMM_FAULT_POINT("survive.sealed");
  inbox_->put(Sealed{job.view.epoch});
}

void AgreementDriver::endOperations(Group& group, ErrorRecord why) {
  if (!group.fail(why, Deadline::after(kNearlyDoneMs))) {
    why.code = ErrorCode::ConnectionReset; // a rank that has left in order cannot be called dead
    if (!group.fail(why, Deadline::after(kNearlyDoneMs))) {
      group.close();
    }
  }
}

void AgreementDriver::meetNow(const Job& job) {
  PYCOMM_FAULT_POINT("survive.meet");
  const auto abort = std::make_shared<JoinAbort>();
  int patience_ms = place_.config().dead_after_ms + kOneStepMs; // longer than the silence of a member
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (view_.epoch != job.view.epoch || over_ || error_ || stop_jobs_) {
      return;
    }
    meeting_ = abort;
    patience_ms <<= std::max(0, failed_meetings_ - (kQuickMeetings - 1));
  }
  std::optional<ErrorRecord> failure;
  bool late = false;
  bool closes = false;
  Epoch made;
  try {
    const Reconfigurable::Plan plan =
        place_.plan(static_cast<int64_t>(job.view.epoch), job.handles, jobRanksOf(job.view));
    made.number = job.view.epoch;
    const TimePoint began = Clock::now();
    made.members = job.members;
    made.met = place_.meet(plan, Deadline::after(patience_ms), *abort);
    made.meeting_ns = std::chrono::nanoseconds(Clock::now() - began).count();
  } catch (const std::exception& exception) {
    failure = recordOf(exception, "the members of the next epoch did not meet");
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    meeting_.reset();
    late = view_.epoch != job.view.epoch || over_;
    closes = error_.has_value();
    if (!failure && !late && !closes) {
      made.changes = changes_;
      present_ = made;
    }
  }
  changed_.notify_all();
  if (failure) {
    inbox_->put(NotMet{job.view.epoch, *std::move(failure)});
  } else if (late || closes) {
    if (!closes) { // others may have it: closed at once, it would tell them that this rank has left
      endOperations(
          *made.met.group, record(ErrorCode::ConnectionReset, "The members of the elastic group change again.", ""));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    retired_.push_back(made.met);
  } else {
    watchFailure(made.met.group, job.view.epoch);
    writePeers(job.handles, job.view.epoch);
  }
  closeRetired();
}

// Once that thread has ended: the agreement's may have posted one more job to it.
void AgreementDriver::closeRest() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (present_) {
      retired_.push_back(std::exchange(present_, std::nullopt)->met);
    }
    for (const Job& job : std::exchange(jobs_, {})) {
      if (job.old.group != nullptr) {
        retired_.push_back(job.old);
      }
    }
  }
  closeRetired();
}

void AgreementDriver::closeRetired() {
  std::vector<Reconfigurable::Met> retired;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    retired.swap(retired_);
  }
  for (const Reconfigurable::Met& met : retired) {
    met.group->close();
  }
}

} // namespace pycomm
