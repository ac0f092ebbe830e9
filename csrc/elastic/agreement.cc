#include "elastic/agreement.h"

#include <algorithm>
#include <utility>

namespace pycomm::elastic {
namespace {

using std::chrono::milliseconds;

bool isHard(ErrorCode code) noexcept {
  return code == ErrorCode::PeerDead || code == ErrorCode::PeerUnresponsive || code == ErrorCode::PeerLeft;
}

bool contains(const std::vector<Incarnation>& list, const Incarnation& one) noexcept {
  return std::find(list.begin(), list.end(), one) != list.end();
}

void delay(TimePoint& instant, TimePoint::duration by) noexcept {
  if (instant != TimePoint::max()) {
    instant += by;
  }
}

} // namespace

bool Agreement::changesMembers(ErrorCode code) noexcept {
  return isHard(code) || code == ErrorCode::ConnectionReset;
}

Agreement::Agreement(const Config& config, const View& first, TimePoint now)
    : config_(config), view_(first), view_id_(first.id()), self_(first.position(config.self)), now_(now) {
  step_.committed = first.step;
  keep();
}

Agreement::Agreement(const Config& config, std::vector<Incarnation> contacts, TimePoint now)
    : config_(config), phase_(Phase::Joining), contacts_(std::move(contacts)), began_(now), retry_at_(now), now_(now) {
  retry_after_ = milliseconds(config_.retry_ms);
  keep(); // it may become a voter, and end before it knows
}

// ---- time

void Agreement::awake(TimePoint now) {
  const TimePoint due = nextTick();
  if (due != TimePoint::max() && now - due > window()) {
    const TimePoint::duration late = now - due;
    began_ += late;
    for (TimePoint* at : {&propose_at_, &retry_at_, &pause_until_, &too_few_until_, &asked_at_}) {
      delay(*at, late);
    }
    if (proposal_) {
      proposal_->since += late;
    }
  }
  now_ = std::max(now_, now);
}

TimePoint Agreement::nextTick() const noexcept {
  const auto later = [&](TimePoint at) { return at > now_ ? at : TimePoint::max(); };
  switch (phase_) {
    case Phase::Joining:
      return std::min({retry_at_, began_ + milliseconds(config_.join_wait_ms), later(promiseAt())});
    case Phase::Working: {
      TimePoint at = std::min(tooFewAt(), retry_at_);
      for (const auto& [newcomer, how] : newcomers_) {
        at = std::min(at, tooFew() && how.linked ? later(how.not_before) : TimePoint::max());
      }
      return at;
    }
    case Phase::Pausing:
      return pause_until_;
    case Phase::Agreeing: {
      TimePoint at = std::min({retry_at_, later(promiseAt()), later(chooseAt())});
      if (!proposal_) {
        at = std::min(at, propose_at_);
      }
      if (!raised_) {
        at = std::min(at, giveUpAt());
        if (leavesInOrder()) {
          at = std::min(at, began_ + milliseconds(config_.dead_after_ms) + window());
        }
      }
      return at;
    }
    case Phase::Over:
      return TimePoint::max();
  }
  return TimePoint::max();
}

void Agreement::tick(TimePoint now) {
  awake(now);
  if (phase_ == Phase::Joining) {
    if (now >= began_ + milliseconds(config_.join_wait_ms)) {
      raise(Action::Error::NotAdmitted);
      phase_ = Phase::Over;
      return;
    }
    if (now >= retry_at_) {
      retry_at_ = now + retry_after_;
      Message join = make(Message::Kind::Join);
      join.step.committed = std::max<int64_t>(loaded_, 0);
      join.step.finished = loaded_ >= 0;
      join.view = loaded_view_;
      send(std::move(join), contacts_);
    }
  }
  if (phase_ == Phase::Working && now >= tooFewAt()) {
    beginIfChangeIsReady(now);
    if (phase_ == Phase::Working) {
      raise(Action::Error::TooFew);
      farewell();
      return;
    }
  }
  if (phase_ == Phase::Working && now >= retry_at_) {
    retry_at_ = now + milliseconds(config_.retry_ms);
    send(make(Message::Kind::Ping), {view_.members.front()}); // does it still wait?
  }
  if (phase_ == Phase::Agreeing) {
    if (leavesInOrder() && !raised_ && now >= began_ + milliseconds(config_.dead_after_ms) + window()) {
      raise(Action::Error::Left); // a process that leaves does not wait for a decision for ever
      farewell();
      return;
    }
    if (!raised_ && now >= giveUpAt()) {
      raise(Action::Error::QuorumLost);
    }
    if (now >= retry_at_) {
      ask(now);
    }
  }
  settle(now);
}

TimePoint Agreement::patience(const Incarnation& of, TimePoint since, TimePoint::duration spare) const {
  if (gone_.count(of) != 0) {
    return since;
  }
  // Whom the detector has not found silent is waited for: it may only have paused. The detector looks on meanwhile.
  return since +
      (suspectedHard(of) ? milliseconds(config_.dead_after_ms / 30) : milliseconds(config_.dead_after_ms) + spare);
}

TimePoint Agreement::takeoverAt(TimePoint now) const {
  return now + milliseconds(config_.dead_after_ms) + (2 + std::max(self_, 0)) * window();
}

// A living quorum may take longer than quorum_wait, although it loses nothing: connections are cut and come back meanwhile, or a member stops that no
// detector finds, and is waited for first until another one proposes, then by that one.
TimePoint Agreement::giveUpAt() const {
  return began_ + (reachesQuorum() ? longestWait() : milliseconds(config_.quorum_wait_ms));
}

// When the promise that is owed may leave.
TimePoint Agreement::promiseAt() const {
  if (!owed_ || !sealed_) {
    return TimePoint::max();
  }
  TimePoint at = TimePoint::min();
  for (const Incarnation& other : phase_ == Phase::Joining ? fellows_ : others(true)) {
    if (reached(other)) {
      continue;
    }
    // The proposer waits longer for this promise than this process for a pong.
    if (phase_ == Phase::Joining) {
      at = std::max(at, asked_at_ + window() / 2);
    } else {
      at = std::max(at, view_.has(other) ? patience(other, began_, window() / 2) : began_ + window());
    }
  }
  return at;
}

// When the proposer has heard all that it waits for.
TimePoint Agreement::chooseAt() const {
  if (!proposal_) {
    return TimePoint::max();
  }
  if (proposal_->value) {
    return config_.accept_split_brain ? proposal_->since + window() : TimePoint::max();
  }
  TimePoint at = TimePoint::min();
  std::vector<Incarnation> awaited = others(true);
  awaited.push_back(config_.self); // its promise waits for its seal, too
  for (const Incarnation& other : awaited) {
    const int position = view_.position(other);
    if (proposal_->promises.count(position) != 0 || proposal_->newcomers.count(other) != 0) {
      continue;
    }
    // Whom pings do not reach has had its time: silence in one direction only is found by nobody's detector here.
    const TimePoint since = reached(other) ? proposal_->since : began_;
    at = std::max(at, position < 0 ? proposal_->since + window() : patience(other, since, window()));
  }
  return at;
}

// ---- who

std::vector<Incarnation> Agreement::others(bool with_newcomers) const {
  std::vector<Incarnation> found;
  for (const Incarnation& member : view_.members) {
    if (member != config_.self && gone_.count(member) == 0) {
      found.push_back(member);
    }
  }
  if (with_newcomers) {
    for (const auto& [newcomer, how] : newcomers_) {
      if (hasLoaded(how)) {
        found.push_back(newcomer);
      }
    }
  }
  return found;
}

std::map<int, std::optional<Accepted>> Agreement::dead() const {
  std::map<int, std::optional<Accepted>> found;
  for (const auto& [peer, last] : gone_) {
    const int position = view_.position(peer);
    if (position < 0) {
      continue;
    }
    if (last.epoch < view_.epoch) {
      found.emplace(position, std::nullopt); // it never came to this epoch
    } else if (!last.accepted || last.accepted->next.parent == view_id_) {
      found.emplace(position, last.accepted);
    }
  }
  return found;
}

std::vector<Testament> Agreement::testaments(const MemberSet& of) const {
  std::vector<Testament> found;
  for (auto& [position, accepted] : dead()) {
    if (of.test(static_cast<size_t>(position))) {
      found.push_back({position, accepted});
    }
  }
  return found;
}

void Agreement::merge(const std::vector<Testament>& testaments) {
  for (const Testament& testament : testaments) {
    if (static_cast<size_t>(testament.position) < view_.members.size() && testament.position != self_) {
      gone_.try_emplace(view_.members[static_cast<size_t>(testament.position)], Gone{view_.epoch, testament.accepted});
    }
  }
}

bool Agreement::suspectedHard(const Incarnation& member) const {
  const auto suspect = suspects_.find(member);
  return (suspect != suspects_.end() && isHard(suspect->second.code)) || isRumoured(member) || deaf_.count(member) != 0;
}

bool Agreement::reached(const Incarnation& other) const {
  const int position = view_.position(other);
  return position >= 0 ? reach_.test(static_cast<size_t>(position)) : contains(newcomers_reached_, other);
}

bool Agreement::isMissing(const Incarnation& member) const {
  return !reached(member) || suspectedHard(member);
}

bool Agreement::reachesQuorum() const {
  MemberSet voters;
  voters.set(static_cast<size_t>(self_));
  for (const Incarnation& other : others()) {
    voters.set(static_cast<size_t>(view_.position(other)), !isMissing(other));
  }
  return isQuorum(voters, view_.members.size(), deadSet());
}

MemberSet Agreement::deadSet() const {
  MemberSet found;
  for (const auto& [position, accepted] : dead()) {
    found.set(static_cast<size_t>(position));
  }
  return found;
}

bool Agreement::cannotLead(const Incarnation& member) const {
  return suspects_.count(member) != 0 || gone_.count(member) != 0 || deaf_.count(member) != 0 || isRumoured(member);
}

bool Agreement::isLowest() const {
  return std::all_of(view_.members.begin(), view_.members.begin() + self_, [&](const Incarnation& lower) {
    return cannotLead(lower);
  });
}

bool Agreement::admits() const noexcept {
  return std::any_of(
      newcomers_.begin(), newcomers_.end(), [&](const auto& newcomer) { return mayAdmit(newcomer.second); });
}

bool Agreement::isIdle() const noexcept {
  return phase_ == Phase::Pausing || (phase_ == Phase::Working && tooFew() && !step_.launched);
}

bool Agreement::awaitsState() const noexcept {
  return isIdle() &&
      std::any_of(newcomers_.begin(), newcomers_.end(), [&](const auto& newcomer) { return loads(newcomer.second); });
}

TimePoint Agreement::tooFewAt() const noexcept {
  TimePoint at = too_few_until_;
  if (step_.launched) {
    return at;
  }
  if (self_ != 0) {
    delay(at, milliseconds(config_.dead_after_ms) + window()); // the detector finds it silent before that
  } else if (!awaits_step_ && awaitsState()) {
    delay(at, milliseconds(config_.join_pause_ms));
  }
  return at;
}

std::vector<Incarnation> Agreement::newcomers(bool hold) const {
  std::vector<Incarnation> found;
  for (const auto& [newcomer, how] : newcomers_) {
    if (isIdle() && (hold ? hasLoaded(how) : loads(how))) {
      found.push_back(newcomer);
    }
  }
  return found;
}

// ---- actions

Message Agreement::make(Message::Kind kind) const {
  Message message;
  message.kind = kind;
  message.from = config_.self;
  message.epoch = view_.epoch;
  message.view = view_id_;
  return message;
}

void Agreement::send(Message message, std::vector<Incarnation> to) {
  if (const auto self = std::find(to.begin(), to.end(), config_.self); self != to.end()) {
    to.erase(self);
    own_.push_back(message);
  }
  if (!to.empty()) {
    Action& action = actions_.emplace_back();
    action.kind = Action::Kind::Send;
    action.to = std::move(to);
    action.message = std::make_shared<const Message>(std::move(message));
  }
}

void Agreement::keep() {
  auto record = std::make_shared<Record>();
  record->view = view_;
  record->accepted = accepted_;
  record->past.assign(past_.begin(), past_.end());
  Action& action = actions_.emplace_back();
  action.kind = Action::Kind::Keep;
  action.record = std::move(record);
}

void Agreement::raise(Action::Error error, const View* where) {
  if (std::exchange(raised_, true)) {
    return;
  }
  Action& action = actions_.emplace_back();
  action.kind = Action::Kind::Raise;
  action.error = error;
  action.view = where == nullptr ? view_ : *where;
  if (error == Action::Error::QuorumLost) {
    action.in_reach = reachesQuorum();
    for (const Incarnation& other : others()) {
      if (isMissing(other)) {
        action.missing.push_back(other);
      }
    }
  }
}

Message Agreement::goodbye() const {
  Message goodbye = make(Message::Kind::Goodbye);
  goodbye.leaving = leavesInOrder() ? Message::Leaving::WithItsStep : Message::Leaving::AtOnce;
  goodbye.accepted = accepted_;
  goodbye.next = view_;
  return goodbye;
}

void Agreement::farewell() {
  send(goodbye(), others());
  phase_ = Phase::Over;
}

std::vector<Agreement::Action> Agreement::takeActions() {
  return std::exchange(actions_, {});
}

// ---- events of this process

void Agreement::step(const StepState& state) {
  if (state.committed > step_.committed) {
    resets_.clear();
  }
  step_ = state;
}

void Agreement::sealed(TimePoint now) {
  awake(now);
  sealed_ = phase_ == Phase::Agreeing;
  settle(now);
}

void Agreement::boundary(TimePoint now, bool admits) {
  awake(now);
  if (phase_ == Phase::Working) {
    phase_ = Phase::Pausing;
    for (auto& [newcomer, how] : newcomers_) {
      how.awaited = admits && mayAdmit(how);
    }
    pause_until_ = now + (admits && this->admits() ? milliseconds(config_.join_pause_ms) : milliseconds(0));
    if (!isLowest()) {
      pause_until_ += window(); // which knows who loads
    }
  }
  settle(now);
}

void Agreement::close(TimePoint now) {
  awake(now);
  if (phase_ == Phase::Joining) {
    phase_ = Phase::Over;
  } else if (phase_ != Phase::Over) {
    farewell();
  }
}

void Agreement::linked(const Incarnation& newcomer, TimePoint now) {
  awake(now);
  if (const auto found = newcomers_.find(newcomer); found != newcomers_.end()) {
    found->second.linked = true;
  }
  settle(now);
}

void Agreement::loaded(int64_t committed, uint64_t view, TimePoint now) {
  awake(now);
  loaded_ = committed;
  loaded_view_ = view;
  retry_at_ = now;
  settle(now);
}

void Agreement::failed(ErrorCode code, const Incarnation& peer, TimePoint now) {
  awake(now);
  if (!changesMembers(code) || phase_ == Phase::Over || peer == config_.self) {
    return;
  }
  const bool newcomer = newcomers_.erase(peer) != 0;
  if (!newcomer && !view_.has(peer)) {
    return;
  }
  if (newcomer && phase_ != Phase::Agreeing) { // no view that it may be in is being decided
    settle(now);
    return;
  }
  if (code == ErrorCode::ConnectionReset) {
    ++resets_[peer];
  }
  // The connection that broke is one of the group that ends, and the next group makes its own: an answer to a ping of this agreement says more.
  const bool is_late = phase_ == Phase::Agreeing && !isHard(code) && view_.has(peer);
  if (!is_late || !reached(peer)) {
    Suspicion& suspicion = suspects_[peer];
    if (!isHard(suspicion.code)) { // else a link of a dead process breaks, too
      suspicion.code = code;
    }
    suspicion.nonce = std::max(suspicion.nonce, is_late ? nonce_ - 1 : nonce_);
  }
  if (view_.has(peer)) {
    if (phase_ == Phase::Agreeing && isHard(code)) {
      const bool are_told = rumours_.count(peer) != 0 || (culprit_ == peer && isHard(cause_));
      accuse(peer, are_told ? std::vector<Incarnation>{peer} : others());
    }
    begin(code, peer, now);
    proposeIfLowest(now);
  }
  settle(now);
}

void Agreement::certified(const Incarnation& peer, const Record& record, TimePoint now) {
  awake(now);
  const bool newcomer = newcomers_.erase(peer) != 0;
  if (phase_ == Phase::Joining && peer != config_.self) {
    gone_.try_emplace(
        peer, Gone{record.view.epoch, record.accepted}); // it may be a member of the view that makes this process one
  }
  if (phase_ == Phase::Over || phase_ == Phase::Joining || peer == config_.self) {
    return;
  }
  if (newcomer || view_.has(peer)) {
    // It may have been in a later epoch, which this process has not heard of: then this epoch has been decided.
    for (const View& view : record.past) {
      learn(view, now);
    }
    learn(record.view, now);
    if (phase_ != Phase::Over && record.view.epoch > view_.epoch) {
      raise(Action::Error::LeftBehind, &record.view);
      phase_ = Phase::Over;
    }
    if (phase_ == Phase::Over) {
      return;
    }
  }
  if (!view_.has(peer) && phase_ != Phase::Agreeing) { // no view that it may be in is being decided
    settle(now);
    return;
  }
  const bool known = !gone_.try_emplace(peer, Gone{record.view.epoch, record.accepted}).second;
  if (phase_ == Phase::Agreeing && !known && view_.has(peer)) {
    Message news = make(Message::Kind::Suspect);
    news.cause = ErrorCode::PeerDead;
    news.culprit = peer;
    news.testaments = testaments();
    send(std::move(news), others());
  }
  if (view_.has(peer)) {
    begin(ErrorCode::PeerDead, peer, now);
    proposeIfLowest(now);
  }
  settle(now);
}

// ---- an agreement begins

void Agreement::begin(ErrorCode cause, const std::optional<Incarnation>& culprit, TimePoint now) {
  if (phase_ != Phase::Working && phase_ != Phase::Pausing) {
    return;
  }
  phase_ = Phase::Agreeing;
  cause_ = cause;
  culprit_ = culprit;
  sealed_ = false;
  began_ = now;
  pause_until_ = TimePoint::max();
  ++nonce_;
  reach_.reset();
  reach_.set(static_cast<size_t>(self_));
  newcomers_reached_.clear();
  Action& seal = actions_.emplace_back();
  seal.kind = Action::Kind::Seal;
  seal.cause = cause;
  seal.culprit = culprit;
  retry_after_ = milliseconds(config_.retry_ms);
  ask(now);
  propose_at_ = isLowest() ? now : takeoverAt(now);
}

// To everyone, also whom it has heard: they may be in a later epoch by now, and answer.
void Agreement::ask(TimePoint now) {
  Message suspect = make(Message::Kind::Suspect);
  suspect.cause = cause_;
  suspect.culprit = culprit_;
  suspect.testaments = testaments();
  std::vector<Incarnation> heard;
  for (const Incarnation& other : others()) {
    const auto suspicion = suspects_.find(other);
    if (suspicion != suspects_.end() && isHard(suspicion->second.code)) {
      accuse(other, {other});
    } else {
      heard.push_back(other);
    }
  }
  send(std::move(suspect), std::move(heard));
  std::vector<Incarnation> silent = others(true);
  std::erase_if(silent, [&](const Incarnation& other) { return reached(other); });
  Message ping = make(Message::Kind::Ping);
  ping.nonce = nonce_;
  send(std::move(ping), std::move(silent));
  if (proposal_) {
    Message again = make(proposal_->value ? Message::Kind::Accept : Message::Kind::Prepare);
    again.ballot = proposal_->ballot;
    again.cause = cause_;
    again.testaments = testaments(proposal_->dead);
    again.next = proposal_->value;
    std::vector<Incarnation> to = others(!proposal_->value);
    std::erase_if(to, [&, voters = proposal_->voters()](const Incarnation& other) {
      const int position = view_.position(other);
      return position >= 0 && voters.test(static_cast<size_t>(position));
    });
    for (const Incarnation& other : to) {
      if (!view_.has(other)) {
        again.newcomers.push_back(other);
      }
    }
    send(std::move(again), std::move(to));
  }
  retry_at_ = now + retry_after_;
  retry_after_ = std::min<TimePoint::duration>(2 * retry_after_, milliseconds(config_.dead_after_ms / 2));
}

void Agreement::accuse(const Incarnation& member, std::vector<Incarnation> to) {
  Message suspect = make(Message::Kind::Suspect);
  suspect.cause = suspects_.at(member).code;
  suspect.culprit = member;
  suspect.testaments = testaments();
  send(std::move(suspect), std::move(to));
}

void Agreement::beginIfChangeIsReady(TimePoint now) {
  const bool waits = awaitsState();
  if (phase_ == Phase::Pausing && (now >= pause_until_ || (!waits && isLowest()))) {
    begin(ErrorCode::Ok, std::nullopt, now);
  }
  if (phase_ != Phase::Working || !tooFew() || step_.launched || !isLowest()) {
    return;
  }
  // Too few for a step: they wait for nothing but newcomers, and for those that come later only if there are too few without them, and time is left.
  const auto holds = [&](const auto& newcomer) { return mayAdmit(newcomer.second) && hasLoaded(newcomer.second); };
  const auto loaded = static_cast<size_t>(std::count_if(newcomers_.begin(), newcomers_.end(), holds));
  const size_t enough = waits && now < tooFewAt() ? config_.min_ranks - view_.members.size() : 1;
  if (loaded >= enough) {
    for (auto& [newcomer, how] : newcomers_) {
      how.awaited = mayAdmit(how) && hasLoaded(how);
    }
    begin(ErrorCode::Ok, std::nullopt, now);
  }
}

void Agreement::settle(TimePoint now) {
  do {
    while (!own_.empty()) {
      const Message message = std::move(own_.front());
      own_.pop_front();
      if (phase_ != Phase::Over && message.view == view_id_) {
        receivedByMember(message, now);
      }
    }
    beginIfChangeIsReady(now);
    promiseWhenReady(now);
    advance(now);
  } while (!own_.empty());
}

// ---- proposer

void Agreement::propose(TimePoint now) {
  const MemberSet dead_set = deadSet();
  const Ballot ballot(votesOf(dead_set), ++round_, self_);
  if (ballot <= promised_) {
    propose_at_ = takeoverAt(now);
    return;
  }
  proposal_.emplace();
  proposal_->dead = dead_set;
  proposal_->ballot = ballot;
  proposal_->since = now;
  Message prepare = make(Message::Kind::Prepare);
  prepare.ballot = proposal_->ballot;
  prepare.cause = cause_;
  prepare.testaments = testaments(proposal_->dead);
  std::vector<Incarnation> to = others(true);
  for (const Incarnation& other : to) {
    if (!view_.has(other)) {
      prepare.newcomers.push_back(other);
    }
  }
  to.push_back(config_.self);
  send(std::move(prepare), std::move(to));
}

void Agreement::proposeIfLowest(TimePoint now) {
  if (phase_ == Phase::Agreeing && !proposal_ && isLowest()) {
    propose_at_ = std::min(propose_at_, now);
  }
}

void Agreement::advance(TimePoint now) {
  if (phase_ != Phase::Agreeing) {
    return;
  }
  if (!proposal_) {
    if (now >= propose_at_) {
      propose(now);
    }
    return;
  }
  const MemberSet voters = proposal_->voters();
  const bool heard_all = now >= chooseAt();
  bool enough = isQuorum(voters, view_.members.size(), proposal_->dead);
  if (config_.accept_split_brain && now >= proposal_->since + window()) {
    enough = enough || (heard_all && voters.any());
  }
  if (!enough) {
    if (dead().size() > proposal_->dead.count() && (heard_all || proposal_->value)) {
      propose(now); // of fewer votes, fewer are a quorum
    }
    return;
  }
  if (!proposal_->value) {
    if (heard_all) {
      choose(now);
    }
    return;
  }
  const View next = *proposal_->value;
  learn(next, now);
}

void Agreement::choose(TimePoint now) {
  for (const auto& [peer, last] : gone_) {
    if (const int position = view_.position(peer); position >= 0 && last.left) {
      proposal_->left.set(static_cast<size_t>(position));
    }
  }
  std::erase_if(
      proposal_->newcomers, [&](const auto& promise) { return newcomers_.count(promise.first) == 0; }); // failed since
  proposal_->value = chooseNext(view_, *proposal_, dead(), cause_);
  if (!proposal_->value) {
    return; // all members that answered leave; the others may go on
  }
  proposal_->since = now;
  Message accept = make(Message::Kind::Accept);
  accept.ballot = proposal_->ballot;
  accept.testaments = testaments(proposal_->dead);
  accept.next = proposal_->value;
  std::vector<Incarnation> to = others();
  to.push_back(config_.self);
  send(std::move(accept), std::move(to));
}

void Agreement::onPromise(const Message& message) {
  merge(message.testaments);
  if (!proposal_ || proposal_->value || message.ballot != proposal_->ballot) {
    return;
  }
  if (const int position = view_.position(message.from); position >= 0) {
    proposal_->promises.insert_or_assign(position, message);
  } else if (newcomers_.count(message.from) != 0) {
    proposal_->newcomers.insert_or_assign(message.from, message);
  }
}

void Agreement::onRefuse(const Message& message, TimePoint now) {
  merge(message.testaments);
  round_ = std::max(round_, message.ballot.round());
  if (!proposal_ || message.ballot <= proposal_->ballot) {
    return;
  }
  proposal_.reset();
  const auto rival = static_cast<size_t>(message.ballot.proposer());
  const bool works =
      rival < view_.members.size() && static_cast<int>(rival) != self_ && !cannotLead(view_.members[rival]);
  propose_at_ = works ? takeoverAt(now) : now;
}

void Agreement::onAccepted(const Message& message) {
  const int position = view_.position(message.from);
  if (proposal_ && proposal_->value && message.ballot == proposal_->ballot && position >= 0) {
    proposal_->accepted.set(static_cast<size_t>(position));
  }
}

// ---- acceptor

bool Agreement::raisePromise(const Message& message) {
  round_ = std::max(round_, message.ballot.round());
  if (message.ballot < promised_) {
    Message refuse = make(Message::Kind::Refuse);
    refuse.ballot = promised_;
    refuse.testaments = testaments();
    send(std::move(refuse), {message.from});
    return false;
  }
  promised_ = message.ballot;
  return true;
}

void Agreement::onPrepare(const Message& message, TimePoint now) {
  const bool repeats = message.ballot == promised_;
  if (!raisePromise(message)) {
    return;
  }
  owed_ = message.from;
  // Else members would take over from each other, and none could wait for its promises.
  if (!proposal_ && !repeats && !isLowest()) {
    propose_at_ = std::max(propose_at_, takeoverAt(now));
  }
  if (proposal_ && proposal_->ballot < message.ballot) {
    proposal_.reset();
    // Two processes may each believe that their messages do not reach the other: one of them has to wait.
    propose_at_ = deaf_.count(message.from) != 0 ? now + window() : takeoverAt(now);
  }
}

void Agreement::promiseWhenReady(TimePoint now) {
  if ((phase_ != Phase::Agreeing && phase_ != Phase::Joining) || !owed_ || !sealed_ || now < promiseAt()) {
    return;
  }
  Message promise = make(Message::Kind::Promise);
  promise.ballot = promised_;
  promise.newcomers = newcomers_reached_;
  if (phase_ == Phase::Joining) {
    promise.view = asked_view_;
    promise.step.committed = loaded_;
  } else {
    promise.step = step_;
    // A process that has raised still helps others to a quorum. One that closed behind its last step has left, and is not lost.
    promise.leaving = leavesInOrder() ? Message::Leaving::WithItsStep
        : raised_                     ? Message::Leaving::AtOnce
        : leaving_                    ? Message::Leaving::WithItsStep
                                      : Message::Leaving::No;
    promise.reach = reach_;
    for (const auto& [peer, times] : resets_) {
      if (const int position = view_.position(peer); position >= 0 && times >= 2) {
        promise.reach.reset(static_cast<size_t>(position)); // a connection that breaks again and again
      }
    }
    promise.accepted = accepted_;
    promise.testaments = testaments();
  }
  send(std::move(promise), {*std::exchange(owed_, std::nullopt)});
}

void Agreement::onAccept(const Message& message) {
  if (!raisePromise(message)) {
    return;
  }
  accepted_ = Accepted{message.ballot, *message.next};
  keep();
  Message accepted = make(Message::Kind::Accepted);
  accepted.ballot = message.ballot;
  send(std::move(accepted), {message.from});
}

// ---- learner

void Agreement::learn(const View& next, TimePoint now) {
  if (phase_ == Phase::Over || next.parent != view_id_ || next.epoch != view_.epoch + 1) {
    return;
  }
  Message decide = make(Message::Kind::Decide);
  decide.next = next;
  std::vector<Incarnation> to = others();
  for (const Incarnation& member : next.members) {
    if (!view_.has(member)) {
      to.push_back(member);
    }
  }
  send(std::move(decide), std::move(to));
  if (next.has(config_.self)) {
    install(next, now);
    return;
  }
  const bool in_order = next.left.test(static_cast<size_t>(self_)) || leavesInOrder();
  raise(in_order ? Action::Error::Left : Action::Error::LeftBehind, &next);
  phase_ = Phase::Over;
}

void Agreement::install(const View& next, TimePoint now) {
  if (phase_ != Phase::Joining) {
    past_.push_back(view_);
    if (past_.size() > kMaxPast) {
      past_.pop_front();
    }
  }
  if (next.step > step_.committed) {
    resets_.clear();
  }
  step_ = StepState{next.step, step_.launched && step_.committed == next.step, false};
  const bool has_more = std::any_of(
      next.members.begin(), next.members.end(), [&](const Incarnation& member) { return !view_.has(member); });
  view_ = next;
  view_id_ = next.id();
  self_ = next.position(config_.self);
  phase_ = Phase::Working;
  promised_ = Ballot();
  accepted_.reset();
  owed_.reset();
  round_ = 0;
  proposal_.reset();
  sealed_ = false;
  rumours_.clear();
  deaf_.clear();
  propose_at_ = TimePoint::max();
  for (const Incarnation& member : next.members) {
    newcomers_.erase(member);
  }
  for (auto& [newcomer, how] : newcomers_) {
    if (next.cause == ErrorCode::Ok && how.awaited) { // not for nothing again and again
      how.back_off = std::clamp<TimePoint::duration>(2 * how.back_off, window(), std::chrono::minutes(1));
      how.not_before = now + how.back_off;
    }
    how.awaited = false;
    how.loaded = -1; // of the view before
  }
  std::erase_if(suspects_, [&](const auto& suspect) { return !view_.has(suspect.first); });
  std::erase_if(gone_, [&](const auto& peer) { return !view_.has(peer.first); });
  std::erase_if(resets_, [&](const auto& peer) { return !view_.has(peer.first); });
  keep();
  if (raised_) { // the user has got the error already
    farewell();
    return;
  }
  Action& action = actions_.emplace_back();
  action.kind = Action::Kind::Install;
  action.view = next;
  if (!tooFew() || step_.launched) {
    too_few_until_ = tooFew() ? now : TimePoint::max();
  } else if (has_more || too_few_until_ == TimePoint::max()) { // whatever else changes takes from the same time
    too_few_until_ = now + milliseconds(config_.quorum_wait_ms);
  } else if (self_ != 0) { // of this view's rank 0 it has heard nothing
    too_few_until_ = std::max(too_few_until_, now);
  }
  retry_at_ = tooFew() && self_ != 0 ? too_few_until_ : TimePoint::max();
  // Who died since it promised.
  for (const Incarnation& member : next.members) {
    if (gone_.count(member) != 0) {
      begin(ErrorCode::PeerDead, member, now);
    } else if (const auto suspect = suspects_.find(member); suspect != suspects_.end()) {
      begin(suspect->second.code, member, now);
    }
  }
}

// ---- messages

void Agreement::received(const Message& message, TimePoint now) {
  awake(now);
  if (phase_ == Phase::Over && message.kind == Message::Kind::Ping) {
    send(goodbye(), {message.from}); // the first one may be lost
  }
  if (phase_ == Phase::Over || message.from == config_.self) {
    return;
  }
  if (phase_ == Phase::Joining) {
    receivedByNewcomer(message, now);
  } else {
    receivedByMember(message, now);
  }
  settle(now);
}

void Agreement::receivedByMember(const Message& message, TimePoint now) {
  using Kind = Message::Kind;
  // Of any view.
  if (message.kind == Kind::Join) {
    onJoin(message);
    return;
  }
  if (message.kind == Kind::Pong) {
    const int position = view_.position(message.from);
    if (phase_ == Phase::Agreeing && message.nonce == nonce_) {
      if (position >= 0) {
        reach_.set(static_cast<size_t>(position));
      } else if (newcomers_.count(message.from) != 0 && !contains(newcomers_reached_, message.from)) {
        newcomers_reached_.push_back(message.from);
      }
      if (const auto suspect = suspects_.find(message.from);
          suspect != suspects_.end() && suspect->second.nonce < nonce_) {
        suspects_.erase(suspect);
      }
    } else if (phase_ == Phase::Working && position == 0) {
      too_few_until_ = std::max(too_few_until_, now); // it raises for all, or begins
    }
    return;
  }
  if (message.kind == Kind::Decide || message.kind == Kind::Goodbye) {
    learn(*message.next, now);
    // One of a later epoch does not say what its sender had accepted in this one.
    if (message.kind == Kind::Goodbye && phase_ != Phase::Over && view_.has(message.from) &&
        message.epoch <= view_.epoch) {
      if (phase_ == Phase::Working && view_.position(message.from) == 0 && now + window() >= too_few_until_) {
        raise(Action::Error::TooFew); // as that one has
        farewell();
        return;
      }
      Gone& gone = gone_.try_emplace(message.from, Gone{message.epoch, message.accepted}).first->second;
      gone.left = message.leaving == Message::Leaving::WithItsStep;
      begin(ErrorCode::PeerLeft, message.from, now);
      proposeIfLowest(now);
    }
    return;
  }
  if (message.kind == Kind::Excluded) {
    if (message.view == view_id_ && message.next->epoch > view_.epoch) {
      raise(leavesInOrder() ? Action::Error::Left : Action::Error::LeftBehind, &*message.next);
      phase_ = Phase::Over;
    }
    return;
  }
  if (message.kind == Kind::Suspect && message.culprit == config_.self && isHard(message.cause) &&
      view_.has(message.from)) {
    deaf_.insert(message.from);
    proposeIfLowest(now);
  }
  if (message.view != view_id_) {
    if (message.epoch < view_.epoch) {
      answerOld(message);
    } else if (message.epoch > view_.epoch && view_.has(message.from)) {
      // This epoch has been decided, and the decision did not arrive.
      if (phase_ == Phase::Agreeing) {
        Message ask = make(Kind::Suspect);
        ask.cause = cause_;
        send(std::move(ask), {message.from});
      } else {
        begin(ErrorCode::ConnectionReset, std::nullopt, now);
      }
    }
    return;
  }
  // Of this one.
  const auto by_proposer = [&] { // who knows of all the dead that the ballot does not count
    MemberSet dead;
    for (const Testament& testament : message.testaments) {
      dead.set(static_cast<size_t>(testament.position));
    }
    return message.ballot.proposer() == view_.position(message.from) && message.ballot.deadVotes() == votesOf(dead);
  };
  switch (message.kind) {
    case Kind::Ping: {
      Message pong = make(Kind::Pong);
      pong.nonce = message.nonce;
      send(std::move(pong), {message.from});
      return;
    }
    case Kind::Suspect:
      if (message.cause != ErrorCode::Ok && !changesMembers(message.cause)) {
        return;
      }
      merge(message.testaments);
      begin(message.cause, message.culprit, now);
      if (message.culprit && isHard(message.cause) && *message.culprit != config_.self) {
        rumours_.insert(*message.culprit);
        proposeIfLowest(now);
      }
      return;
    case Kind::Prepare:
      if (by_proposer()) {
        merge(message.testaments);
        begin(message.cause, std::nullopt, now);
        onPrepare(message, now);
      }
      return;
    case Kind::Accept:
      if (by_proposer() && message.next->parent == view_id_ && message.next->epoch == view_.epoch + 1) {
        merge(message.testaments);
        begin(message.next->cause, std::nullopt, now);
        onAccept(message);
      }
      return;
    case Kind::Promise:
      onPromise(message);
      return;
    case Kind::Refuse:
      onRefuse(message, now);
      return;
    case Kind::Accepted:
      onAccepted(message);
      return;
    case Kind::Decide:
    case Kind::Excluded:
    case Kind::Pong:
    case Kind::Join:
    case Kind::Goodbye:
      return;
  }
}

void Agreement::receivedByNewcomer(const Message& message, TimePoint now) {
  switch (message.kind) {
    case Message::Kind::Ping: {
      Message pong = make(Message::Kind::Pong);
      pong.nonce = message.nonce;
      send(std::move(pong), {message.from});
      if (contains(fellows_, message.from) && !reached(message.from)) { // this process may not have known it before
        Message ping = make(Message::Kind::Ping);
        ping.nonce = nonce_;
        send(std::move(ping), {message.from});
      }
      return;
    }
    case Message::Kind::Pong:
      if (message.nonce == nonce_ && contains(fellows_, message.from) && !contains(newcomers_reached_, message.from)) {
        newcomers_reached_.push_back(message.from);
      }
      return;
    case Message::Kind::Prepare: {
      // Else it is of a view that has this process already, where its promise would be a vote: the decision is on its way. Or of a view of
      // which it has no state.
      if (loaded_ < 0 || message.view != loaded_view_ || !contains(message.newcomers, config_.self)) {
        return;
      }
      if (asked_view_ != message.view) {
        asked_view_ = message.view;
        asked_at_ = now;
        ++nonce_;
        newcomers_reached_.clear();
        fellows_ = message.newcomers;
        std::erase(fellows_, config_.self);
        Message ping = make(Message::Kind::Ping);
        ping.nonce = nonce_;
        send(std::move(ping), fellows_);
      }
      // It votes for nothing, so it may promise anything: the promise says what it holds.
      promised_ = message.ballot;
      owed_ = message.from;
      sealed_ = true;
      return;
    }
    case Message::Kind::Decide:
      if (!message.next->has(config_.self)) {
        return;
      }
      if (message.next->step != loaded_ || message.next->parent != loaded_view_) { // members would wait for it
        raise(Action::Error::NotAdmitted);
        phase_ = Phase::Over;
        return;
      }
      step_.committed = loaded_;
      install(*message.next, now);
      return;
    case Message::Kind::Excluded:
      if (message.view == view_id_) { // it has not heard that it was a member
        raise(Action::Error::LeftBehind, &*message.next);
        phase_ = Phase::Over;
      }
      return;
    case Message::Kind::Suspect:
    case Message::Kind::Promise:
    case Message::Kind::Refuse:
    case Message::Kind::Accept:
    case Message::Kind::Accepted:
    case Message::Kind::Join:
    case Message::Kind::Goodbye:
      return;
  }
}

void Agreement::onJoin(const Message& message) {
  if (view_.has(message.from)) {
    Message decide = make(Message::Kind::Decide); // it has not heard that it was admitted
    decide.next = view_;
    send(std::move(decide), {message.from});
    return;
  }
  const auto found = newcomers_.find(message.from);
  if (found == newcomers_.end() && (gone_.count(message.from) != 0 || !makesRoomFor(message.from))) {
    return;
  }
  Newcomer& newcomer = newcomers_[message.from];
  newcomer.loaded = message.step.finished && message.view == view_id_ ? message.step.committed : -1;
  if (found == newcomers_.end()) {
    Action& action = actions_.emplace_back();
    action.kind = Action::Kind::Link;
    action.of = message.from;
  }
}

bool Agreement::makesRoomFor(const Incarnation& newcomer) {
  if (newcomers_.size() < kMaxNewcomers) {
    return true;
  }
  const auto last =
      std::find_if(newcomers_.rbegin(), newcomers_.rend(), [&](const auto& known) { return !hasLoaded(known.second); });
  if (phase_ != Phase::Working || last == newcomers_.rend() || last->first < newcomer) {
    return false;
  }
  newcomers_.erase(std::prev(last.base()));
  return true;
}

// A question in an epoch that is over.
void Agreement::answerOld(const Message& message) {
  using Kind = Message::Kind;
  if (message.kind != Kind::Suspect && message.kind != Kind::Prepare && message.kind != Kind::Accept &&
      message.kind != Kind::Ping && message.kind != Kind::Promise) {
    return;
  }
  if (message.view == 0) {
    return; // a newcomer's, which is in no epoch
  }
  const auto follows = [&](const View& view) { return view.parent == message.view; };
  const auto found = std::find_if(past_.begin(), past_.end(), follows);
  const View* next = found != past_.end() ? &*found : follows(view_) ? &view_ : nullptr;
  if (next != nullptr) { // it may say that the process has left in order
    Message decide = make(Kind::Decide);
    decide.next = *next;
    send(std::move(decide), {message.from});
    return;
  }
  Message excluded = make(Kind::Excluded);
  excluded.view = message.view;
  excluded.next = view_;
  send(std::move(excluded), {message.from});
}

} // namespace pycomm::elastic
