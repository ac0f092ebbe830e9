// How a process becomes a member of an elastic group that runs, as both sides see it.
//
//   1. The newcomer asks a member who is in the group (ask()), and from then on sends Join to all of them, every 200 ms.
//   2. Each member introduces the newcomer to its Agreement, sends it a ping, and looks for its record if it is on the same host. Then the
//      newcomer can be reached. If all members say so in the commit round of a step, they stop before their next forward pass: a round of
//      its own ends the epoch there (Agreement::boundary()).
//   3. Rank 0's training thread gives the members' state to the newcomers then (give()): one connection to a newcomer's endpoint, with parts of
//      1 MiB. All stay there until the next members are known (newcomers()). If those are too few for a step, they stay on, and their rank 0 gives
//      the state to each newcomer that comes.
//   4. The newcomer's training thread loads it (arrive(), loaded()), which its next Join says, and the agreement admits it.
//
// Each member drops a newcomer of which it has heard nothing for as long as a member may be silent. So a newcomer that dies costs the members
// no more than that, and only if they wait for it just then.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <limits>
#include <utility>

#include "base/fault_point.h"
#include "base/log.h"
#include "base/printable.h"
#include "engine/meeting/endpoint_words.h"
#include "engine/survive/agreement_driver.h"
#include "engine/survive/agreement_inbox.h"

namespace pycomm {
namespace {

using elastic::Incarnation;
using elastic::View;
using std::chrono::milliseconds;

constexpr size_t kMostMessages = 4096; // in the inbox: more than the members of any view send between two turns
constexpr size_t kMostStrangers = 64;
constexpr size_t kMostFormer = 256; // members that are none any more
constexpr size_t kStatePartNbytes = 1 << 20;
constexpr int kShortestAskMs = kOneStepMs / 8; // so many that do not answer leave time for the next one
constexpr std::string_view kStateBegins =
    "begin"; // step, id of the members' view, its epoch, bytes of the state, roster
constexpr std::string_view kStatePart = "part"; // the next bytes
constexpr std::string_view kStateRefused = "refuse"; // epoch, why

std::optional<int64_t> wholeNumber(const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? std::optional<int64_t>(number) : std::nullopt;
}

std::string secondsOf(int ms) {
  std::string text = std::to_string(ms / 1000.0);
  text.erase(text.find_last_not_of('0') + 1);
  return text.back() == '.' ? text.substr(0, text.size() - 1) : text;
}

} // namespace

// ---- the inbox

bool AgreementDriver::Inbox::knows(
    const ProcessId& from,
    const std::string& handle,
    const std::optional<ProcessId>& endpoint) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto known = endpoints_.find(from); known != endpoints_.end()) {
    return !endpoint || *endpoint == known->second;
  }
  if (notice_.empty() && !expects_state_) {
    return false; // nobody can join
  }
  MemberHandle stranger;
  try {
    stranger = MemberHandle::parse(handle);
  } catch (const Error&) {
    return false;
  }
  if (stranger.incarnation != from || (endpoint && *endpoint != stranger.endpoint)) {
    return false;
  }
  const ProcessId at = stranger.endpoint;
  if (!putLocked(Introduced{std::move(stranger)}, kMostMessages)) {
    return false; // it comes again; in endpoints_ it would count as introduced
  }
  if (strangers_.size() >= kMostStrangers) {
    endpoints_.erase(strangers_.front());
    strangers_.pop_front();
  }
  strangers_.push_back(from);
  endpoints_.emplace(from, at);
  return true;
}

bool AgreementDriver::Inbox::deliver(const ProcessId& from, const std::string& bytes) {
  auto message = elastic::decodeMessage(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (endpoints_.count(from) == 0) {
    return false; // forgotten while it was silent
  }
  if (message && message->from == incarnationOf(from)) {
    putLocked(*std::move(message), kMostMessages);
  }
  return true;
}

bool AgreementDriver::Inbox::take(const ProcessId& from, const std::vector<std::string>& words) {
  PYCOMM_FAULT_POINT("survive.take");
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!expects_state_ || words.size() < 3) {
    return false;
  }
  // A rank 0 that was stopped does not know that the others have gone on without it, and that the next one gives the state.
  const auto isLate = [this](const std::optional<int64_t>& epoch) { return !epoch || *epoch < given_in_; };
  if (words[1] == kStateBegins && words.size() >= 7) {
    const auto step = wholeNumber(words[2]);
    const auto view = wholeNumber(words[3]);
    const auto epoch = wholeNumber(words[4]);
    const auto nbytes = wholeNumber(words[5]);
    if (!step || !view || isLate(epoch) || !nbytes || *nbytes <= 0) {
      return false;
    }
    giver_ = from;
    given_in_ = *epoch;
    state_nbytes_ = static_cast<size_t>(*nbytes);
    state_ = State{*step, static_cast<uint64_t>(*view), {words.begin() + 6, words.end()}, ""};
    return true;
  }
  if (words[1] == kStatePart && giver_ == from && words[2].size() <= state_nbytes_ - state_.bytes.size()) {
    state_.bytes += words[2];
    if (state_.bytes.size() == state_nbytes_) {
      giver_.clear();
      putLocked(std::exchange(state_, {}), SIZE_MAX);
    }
    return true;
  }
  if (words[1] == kStateRefused && words.size() >= 4 && !isLate(wholeNumber(words[2]))) {
    putLocked(Refused{printable(words[3], kMaxFirstEndpointFrame)}, kMostMessages);
    return true;
  }
  return false;
}

// ---- the newcomer

namespace {

/// The answer of one member, or of the process that has its port, to a process that wants to join.
struct Answer {
  std::optional<AgreementDriver::MemberList> notice;
  std::string why; ///< there is none
  bool is_other = false; ///< the process there has another secret, or is of another job
};

/// `incarnation`: "" at a fixed port.
Answer askOne(const MemberHandle& to, std::string_view incarnation, const Visitor& from, Deadline patience) {
  const AbortToken none;
  Answer answer;
  answer.why = "it has no elastic training that can be joined";
  try {
    const Dialed dialed = dial(to, from, patience, none);
    if (dialed.link == nullptr) {
      answer.why = dialed.why;
      answer.is_other = dialed.another_listens;
      return answer;
    }
    const auto words = askEndpoint(*dialed.link, {endpoint_request::kWho, incarnation}, patience, none);
    if (words.front() == endpoint_answer::kHere && words.size() > 2) {
      AgreementDriver::MemberList notice{words[1], {}};
      for (size_t i = 2; i < words.size(); ++i) {
        notice.members.push_back(MemberHandle::parse(words[i]));
      }
      answer.notice = std::move(notice);
    } else if (words.front() == endpoint_answer::kGone) {
      answer.why = "it is a later process";
    }
  } catch (const Error& error) {
    answer.why = error.record().summary;
  }
  return answer;
}

/// For one of `left` that are still to be asked: also the last one of many is, if all others are on hosts that are gone.
Deadline shareOf(Deadline deadline, size_t left) {
  const int share = deadline.remainingMs(std::numeric_limits<int>::max()) / static_cast<int>(left);
  return Deadline::at(
      std::min(deadline.instant(), Deadline::after(std::clamp(share, kShortestAskMs, kOneStepMs)).instant()));
}

void note(std::string& missing, const std::string& whom, const std::string& why) {
  missing += (missing.empty() ? "" : "; ") + whom + ": " + printable(why, kMaxFirstEndpointFrame);
}

} // namespace

std::optional<AgreementDriver::MemberList> AgreementDriver::ask(
    const std::vector<std::string>& handles,
    const Visitor& from,
    Deadline deadline,
    std::string& missing) {
  for (size_t i = 0; i < handles.size() && !deadline.expired(); ++i) {
    const MemberHandle to = MemberHandle::parse(handles[i]);
    if (to.key_id != from.self.key_id) { // all members have the same
      const auto secret = [](const std::string& key_id) {
        return key_id.empty() ? std::string("no secret") : "the secret of key id " + key_id;
      };
      throw Error(
          ErrorCode::ConfigMismatch,
          "the members have " + secret(to.key_id) + ", and this process has " + secret(from.self.key_id),
          "give all hosts the same secret file, or none");
    }
    Answer answer = askOne(to, to.incarnation, from, shareOf(deadline, handles.size() - i));
    if (answer.notice) {
      return std::move(answer.notice);
    }
    note(missing, to.who(), answer.why);
  }
  return std::nullopt;
}

std::optional<AgreementDriver::MemberList> AgreementDriver::ask(
    const FixedPort& at,
    const Visitor& from,
    Deadline deadline,
    std::string& missing) {
  bool all_are_others = true;
  for (size_t i = 0; i < at.hosts.size(); ++i) {
    const std::string& host = at.hosts[i];
    const Deadline share = shareOf(deadline, at.hosts.size() - i);
    const std::vector<SocketAddress> addresses = at.addressesOf(host, share);
    if (addresses.empty()) {
      note(missing, host, "this name has no address");
      all_are_others = false;
    }
    for (size_t k = 0; k < addresses.size(); ++k) {
      const MemberHandle to = FixedPort::listenerAt(addresses[k], from.self);
      Answer answer = askOne(to, "", from, shareOf(share, addresses.size() - k));
      if (answer.notice) {
        return std::move(answer.notice);
      }
      all_are_others = all_are_others && answer.is_other;
      note(missing, host + " (" + addresses[k].text() + ")", answer.why);
    }
  }
  if (all_are_others) { // else a member may still come to one of the ports
    throw Error(ErrorCode::ConfigMismatch, missing, "the members' secret file, and a port that no other job uses");
  }
  return std::nullopt;
}

std::shared_ptr<AgreementDriver> AgreementDriver::askToJoin(
    Reconfigurable& place,
    const std::vector<MemberHandle>& asked,
    const Config& config) {
  std::shared_ptr<AgreementDriver> driver(new AgreementDriver(place, config));
  driver->engine_.add(std::weak_ptr<Maker>(driver));
  try {
    driver->seek(asked);
    driver->start();
  } catch (...) {
    driver->close();
    throw;
  }
  return driver;
}

void AgreementDriver::seek(const std::vector<MemberHandle>& asked) {
  inbox_->expectState(true);
  inbox_->know(asked);
  place_.receive(inbox_);
  introduce(place_.visitor().self);
  std::vector<Incarnation> contacts;
  for (const MemberHandle& member : asked) {
    introduce(member);
    contacts.push_back(incarnationOf(member.incarnation));
  }
  keepRecord();
  ask_again_ = Clock::now() + kSayAgain;
  agreement_ = std::make_unique<elastic::Agreement>(settings(), std::move(contacts), Clock::now());
  act(); // keeps the first record
}

AgreementDriver::Arrival AgreementDriver::arrive(Deadline deadline) {
  refuseInChild();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto admitted = [this] { return present_ && !view_.members.empty(); };
  if (!waitFor(lock, deadline, [&] { return error_ || arrived_ || admitted(); })) {
    return {};
  }
  if (admitted()) {
    return {std::nullopt, present_};
  }
  if (error_) {
    throw Error(*error_);
  }
  taken_ = {arrived_->step, arrived_->view};
  return {std::exchange(arrived_, std::nullopt), std::nullopt};
}

void AgreementDriver::loaded() {
  refuseInChild();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (view_.members.empty()) {
    ledger_.load(taken_.step);
    inbox_->put(taken_);
  }
}

// Witnesses first: from its first step on the newcomer knows of the ends of the others of its host.
void AgreementDriver::takeRoster(State state) {
  ++states_;
  const std::vector<std::string>& roster = state.roster;
  next_number_ = static_cast<int>(wholeNumber(roster.front()).value_or(0));
  std::vector<MemberHandle> known;
  for (size_t i = 1; i + 1 < roster.size(); i += 2) {
    const MemberHandle handle = MemberHandle::parse(roster[i]);
    Member& member = introduce(handle);
    member.number = static_cast<int>(wholeNumber(roster[i + 1]).value_or(-1));
    known.push_back(handle);
    findWitness(member);
  }
  inbox_->know(known);
  Job show;
  show.kind = Job::Kind::Show;
  show.state = std::move(state);
  post(std::move(show));
}

// Others may have joined since, and they have to be asked as well.
void AgreementDriver::askNow(const std::vector<std::string>& handles) noexcept {
  try {
    std::string missing;
    if (auto notice = ask(handles, place_.visitor(), Deadline::after(kOneStepMs), missing)) {
      inbox_->put(*std::move(notice));
    }
  } catch (const std::exception&) { // next time
  }
}

void AgreementDriver::show(State state) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    arrived_ = std::move(state);
  }
  changed_.notify_all();
}

ErrorRecord AgreementDriver::notAdmitted() const {
  std::string asked;
  for (const Incarnation& one : agreement_->contacts()) {
    asked += (asked.empty() ? "" : "; ") + members_by_name_.at(one).handle.who();
  }
  const std::string came = states_ == 0
      ? "their state did not come"
      : "their state came " + std::to_string(states_) + " times, the last one too late";
  return record(
      ErrorCode::RendezvousTimeout,
      "This process was not admitted to an elastic training within join_wait=" + secondsOf(config_.join_wait_ms) +
          " s (timed out). It asked the members (" + asked + "); " + came + ".",
      "see whether they still train: members admit others at the end of a step, and their rank 0 gives the state as its next forward pass "
      "begins; after a long evaluation, or with a slow state, a longer join_pause on all members helps");
}

ErrorRecord AgreementDriver::missedMembership(const View& now) const {
  return record(
      ErrorCode::LeftBehind,
      "The members of an elastic training had admitted this process, and went on without it before it heard of that: they are in epoch " +
          std::to_string(now.epoch) +
          ". Its process was stopped, or its network was cut, for longer than heartbeat_timeout.",
      "start it anew: it joins as another process");
}

// ---- newcomers, as members see them

elastic::Agreement::Config AgreementDriver::settings() const {
  elastic::Agreement::Config settings = config_;
  settings.self = self_;
  settings.dead_after_ms = place_.config().dead_after_ms;
  settings.join_wait_ms = std::max(1, config_.join_wait_ms - config_.join_spent_ms);
  return settings;
}

AgreementDriver::Member& AgreementDriver::introduce(const MemberHandle& handle) {
  const Incarnation name = incarnationOf(handle.incarnation);
  const auto [found, is_new] = members_by_name_.try_emplace(name);
  Member& member = found->second;
  if (is_new) {
    member.handle = handle;
    if (name != self_) {
      member.outbox = std::make_unique<Outbox>(handle, place_.visitor());
    }
  }
  return member;
}

// Whether a message goes to the agreement. Of a process that was no member yet, members take only what a newcomer says.
bool AgreementDriver::mayHear(const elastic::Message& message, TimePoint now) {
  using Kind = elastic::Message::Kind;
  const auto found = members_by_name_.find(message.from);
  if (found == members_by_name_.end()) {
    return false; // nor could it be answered
  }
  Member& from = found->second;
  if (agreement_->view().members.empty()) {
    return message.kind != Kind::Join; // this is a newcomer itself
  }
  if (from.number >= 0) {
    const bool is_late = message.kind == Kind::Join && !agreement_->view().has(message.from);
    if (is_late) { // it was a member, and cut off before it knew
      exclude(from);
    }
    return !is_late;
  }
  if (message.kind == Kind::Join) {
    if (!config_.mayBeJoined() || now < from.not_before) {
      return false;
    }
    from.heard = now;
    if (from.links && from.outbox->isIdle()) {
      pingNewcomer(from);
    }
    return true;
  }
  return message.kind == Kind::Ping || message.kind == Kind::Pong || message.kind == Kind::Promise;
}

void AgreementDriver::exclude(Member& newcomer) {
  elastic::Message excluded;
  excluded.kind = elastic::Message::Kind::Excluded;
  excluded.from = self_;
  excluded.epoch = agreement_->view().epoch;
  excluded.next = agreement_->view();
  newcomer.outbox->push(encode(excluded));
}

void AgreementDriver::link(const Incarnation& newcomer) {
  Member& member = members_by_name_.at(newcomer);
  log(LogLevel::Info, "a process wants to join the elastic group: " + member.handle.who());
  member.links = true;
  pingNewcomer(member);
}

// Its answer at the endpoint says that it can be reached.
void AgreementDriver::pingNewcomer(Member& newcomer) {
  PYCOMM_FAULT_POINT("survive.link");
  elastic::Message ping;
  ping.kind = elastic::Message::Kind::Ping;
  ping.from = self_;
  newcomer.outbox->push(encode(ping));
}

bool AgreementDriver::findWitness(Member& member) {
  if (member.asked_witness || member.ended || member.outbox == nullptr || member.handle.watch_name.empty() ||
      member.handle.host != place_.visitor().self.host) {
    return false;
  }
  member.asked_witness = true;
  Job find;
  find.kind = Job::Kind::FindWitness;
  find.process = member.handle;
  post(std::move(find));
  return true;
}

void AgreementDriver::findWitnessNow(const MemberHandle& process) {
  Witnessed witnessed{incarnationOf(process.incarnation), nullptr};
  try {
    witnessed.witness = std::make_shared<Witness>(Witness::of(
        process,
        process.watch_name,
        recordKey(process.incarnation, place_.config().security.secret.get()),
        Deadline::after(kNearlyDoneMs))); // it has just answered
  } catch (const std::exception& error) {
    log(LogLevel::Info, "the end of " + process.who() + " will not be certified: " + error.what());
  }
  PYCOMM_FAULT_POINT("survive.witness");
  inbox_->put(std::move(witnessed));
}

void AgreementDriver::handleJoining(Event& event, TimePoint now) {
  const bool is_newcomer = agreement_->view().members.empty();
  if (const auto* const introduced = std::get_if<Introduced>(&event)) {
    if (hasRoomFor(introduced->handle, now)) {
      introduce(introduced->handle).keep_until = now + milliseconds(place_.config().dead_after_ms);
    } else {
      inbox_->forget(introduced->handle.incarnation); // it may introduce itself again
    }
  } else if (auto* const witnessed = std::get_if<Witnessed>(&event)) {
    const auto found = members_by_name_.find(witnessed->name);
    if (found == members_by_name_.end()) {
      return;
    }
    Member& member = found->second;
    if (witnessed->witness != nullptr) {
      member.witness.emplace(std::move(*witnessed->witness));
    }
    if (!is_newcomer && member.number < 0) {
      agreement_->linked(witnessed->name, now);
    }
  } else if (auto* const state = std::get_if<State>(&event)) {
    if (is_newcomer) {
      takeRoster(std::move(*state));
    }
  } else if (const auto* const loaded = std::get_if<Loaded>(&event)) {
    agreement_->loaded(loaded->step, loaded->view, now);
  } else if (const auto* const notice = std::get_if<MemberList>(&event)) {
    if (is_newcomer) {
      inbox_->know(notice->members);
      std::vector<Incarnation> contacts;
      for (const MemberHandle& member : notice->members) {
        introduce(member);
        contacts.push_back(incarnationOf(member.incarnation));
      }
      agreement_->setContacts(std::move(contacts));
      ask_again_ = now + kSayAgain;
    }
  } else if (const auto* const lost = std::get_if<NotGiven>(&event)) {
    if (const auto found = members_by_name_.find(lost->to); found != members_by_name_.end()) {
      Member& member = found->second;
      const TimePoint::duration longest = milliseconds(config_.join_wait_ms); // it waits no longer itself
      member.back_off = std::max<TimePoint::duration>(kSayAgain, std::min(2 * member.back_off, longest));
      member.not_before = now + member.back_off;
      dropNewcomer(lost->to, lost->why.code, now);
    }
  } else if (const auto* const refused = std::get_if<Refused>(&event); refused != nullptr && is_newcomer) {
    failWith(record(ErrorCode::JoinRefused, refused->why, ""));
    agreement_->close(now);
  }
}

// It may come again.
void AgreementDriver::dropNewcomer(const Incarnation& newcomer, ErrorCode why, TimePoint now) {
  Member& member = members_by_name_.at(newcomer);
  if (agreement_->view().has(newcomer)) {
    return;
  }
  member.links = false;
  member.heard = TimePoint::max();
  member.keep_until = std::max(member.not_before, now + milliseconds(place_.config().dead_after_ms));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (give_abort_ != nullptr && receiver_ == newcomer) { // another one waits for its turn
      (void)give_abort_->abort(record(ErrorCode::PeerUnresponsive, "It is silent.", ""));
    }
  }
  agreement_->failed(
      elastic::Agreement::changesMembers(why) ? why : ErrorCode::ConnectionReset, newcomer, now); // the newcomer's only
}

// Processes that are no members stay known for some time: a newcomer may come again, and a former member may ask what has become of the others.
// Nobody can make this process remember more than kMostStrangers. While a view is being decided none is forgotten, as it may be in that.
bool AgreementDriver::hasRoomFor(const MemberHandle& stranger, TimePoint now) {
  if (members_by_name_.count(incarnationOf(stranger.incarnation)) != 0) {
    return true;
  }
  if (agreement_->view().members.empty()) {
    return members_by_name_.size() < 2 * elastic::kMaxMembers;
  }
  forgetStrangers(now);
  const auto strangers = std::count_if(
      members_by_name_.begin(), members_by_name_.end(), [](const auto& one) { return one.second.number < 0; });
  return strangers < static_cast<std::ptrdiff_t>(kMostStrangers);
}

void AgreementDriver::forgetStrangers(TimePoint now) {
  if (agreement_->view().members.empty() || isOver()) {
    return;
  }
  std::vector<std::pair<TimePoint, Incarnation>> former;
  std::vector<Incarnation> over;
  for (const auto& [name, member] : members_by_name_) {
    if (member.number < 0 && member.heard == TimePoint::max() && now >= member.keep_until) {
      over.push_back(name);
    } else if (member.number >= 0 && member.gone_at != TimePoint::max()) {
      former.emplace_back(member.gone_at, name);
    }
  }
  if (former.size() > kMostFormer) {
    std::sort(former.begin(), former.end());
    for (size_t i = 0; i < former.size() - kMostFormer; ++i) {
      over.push_back(former[i].second);
    }
  }
  for (const Incarnation& name : over) {
    inbox_->forget(members_by_name_.at(name).handle.incarnation);
    members_by_name_.erase(name);
  }
}

void AgreementDriver::lookAfterNewcomers(TimePoint now) {
  if (agreement_->view().members.empty()) {
    if (now >= ask_again_) {
      ask_again_ = now + 2 * milliseconds(kOneStepMs); // or as the answer says
      Job ask;
      ask.kind = Job::Kind::Ask;
      for (const Incarnation& name : agreement_->contacts()) {
        ask.handles.push_back(members_by_name_.at(name).handle.text());
      }
      post(std::move(ask));
    }
    return;
  }
  std::vector<Incarnation> reached;
  std::vector<Incarnation> silent;
  for (auto& [name, member] : members_by_name_) {
    if (member.number >= 0 || member.heard == TimePoint::max()) {
      continue;
    }
    if (member.links && member.outbox->hasEntered() && member.outbox->isIdle()) {
      reached.push_back(name);
    } else if (now >= member.heard + milliseconds(place_.config().dead_after_ms)) {
      silent.push_back(name);
    }
  }
  for (const Incarnation& name : reached) {
    Member& member = members_by_name_.at(name);
    member.links = false;
    if (!findWitness(member)) { // else when that has been looked for
      agreement_->linked(name, now);
      act();
    }
  }
  for (const Incarnation& name : silent) {
    dropNewcomer(name, ErrorCode::PeerUnresponsive, now);
    act();
  }
  forgetStrangers(now);
}

TimePoint AgreementDriver::newcomersTick() const {
  TimePoint at = agreement_->view().members.empty() ? ask_again_ : TimePoint::max();
  for (const auto& [name, member] : members_by_name_) {
    if (member.number >= 0 || member.heard == TimePoint::max()) {
      continue;
    }
    at = std::min(at, member.heard + milliseconds(place_.config().dead_after_ms));
  }
  return at; // strangers are forgotten at any later turn
}

std::string AgreementDriver::welcome(const View& view) {
  std::string fresh;
  for (const Incarnation& name : view.members) {
    Member& member = members_by_name_.at(name);
    if (member.number < 0) {
      member.number = next_number_++;
      member.heard = TimePoint::max();
      member.links = false;
      inbox_->know({member.handle});
      if (name == self_) {
        inbox_->expectState(false);
      }
      fresh += (fresh.empty() ? "" : ", ") + who(view, name);
    }
  }
  return fresh;
}

void AgreementDriver::admitNobody() {
  inbox_->announce({});
  place_.withdraw(); // another member of this host takes the port
}

void AgreementDriver::announce(const View& view) {
  if (!config_.mayBeJoined()) {
    return;
  }
  std::vector<std::string> notice = {config_.description};
  for (const Incarnation& name : view.members) {
    notice.push_back(members_by_name_.at(name).handle.text());
  }
  inbox_->announce(std::move(notice));
}

void AgreementDriver::showNewcomers() {
  Giving giving;
  const View& view = agreement_->view();
  giving.epoch = view.epoch;
  giving.view = view.id();
  const std::vector<Incarnation> loading = agreement_->loading();
  const std::vector<Incarnation> holding = agreement_->holding();
  if (view.position(self_) == 0) {
    for (const Incarnation& name : loading) {
      giving.to.push_back(members_by_name_.at(name).handle);
    }
  }
  giving.ranks = view.members.size() + loading.size() + holding.size();
  if (!giving.to.empty()) {
    giving.roster.push_back(std::to_string(next_number_));
    const auto enter = [&](const Incarnation& name) {
      const Member& member = members_by_name_.at(name);
      giving.roster.push_back(member.handle.text());
      giving.roster.push_back(std::to_string(member.number));
    };
    for (const auto* const each : {&view.members, &loading, &holding}) {
      std::for_each(each->begin(), each->end(), enter);
    }
    giving.until = agreement_->pauseUntil();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_ = std::move(giving);
    std::erase_if(tried_, [this](const ProcessId& one) { // one that comes again is given it again
      return std::none_of(
          waiting_.to.begin(), waiting_.to.end(), [&](const MemberHandle& to) { return to.incarnation == one; });
    });
  }
  changed_.notify_all();
}

// ---- the training thread of rank 0

std::optional<size_t> AgreementDriver::newcomers(Deadline deadline) {
  refuseInChild();
  std::unique_lock<std::mutex> lock(mutex_);
  awaits_step_ = false;
  const auto asks = [this](const MemberHandle& to) { return tried_.count(to.incarnation) == 0; };
  const auto goesOn = [this] { // the next group may still be made
    return !over_ && view_.members.size() >= config_.min_ranks;
  };
  const bool found = waitFor(lock, deadline, [&] {
    return error_ || ledger_.hasLeft() || goesOn() || std::any_of(waiting_.to.begin(), waiting_.to.end(), asks);
  });
  if (ledger_.hasLeft() || error_) { // a forward pass that trains nothing may follow; begin() throws
    return 0;
  }
  batch_ = waiting_;
  std::erase_if(batch_.to, [&](const MemberHandle& to) { return !asks(to); });
  batch_.until = batch_.until.value_or(Clock::now() + milliseconds(config_.join_pause_ms));
  may_give_ = !batch_.to.empty();
  return found ? std::optional<size_t>(batch_.to.size()) : std::nullopt;
}

size_t AgreementDriver::ranksWithNewcomers() const {
  refuseInChild();
  const std::lock_guard<std::mutex> lock(mutex_);
  return batch_.ranks;
}

void AgreementDriver::giveEach(const GiveOne& give_one) {
  refuseInChild();
  Giving serving;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    serving = std::exchange(batch_, {});
  }
  TimePoint::duration longest{};
  for (const MemberHandle& to : serving.to) {
    const TimePoint began = Clock::now();
    const auto abort = std::make_shared<AbortToken>();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!may_give_ &&
          began < *serving.until) { // a member has died, or a signal has come: the next state is for this one, too
        return;
      }
      tried_.insert(to.incarnation);
      receiver_ = incarnationOf(to.incarnation);
      give_abort_ = abort;
    }
    std::optional<ErrorRecord> why;
    if (longest != TimePoint::duration::zero() && began + longest > *serving.until) {
      why = record(
          ErrorCode::ConnectionReset,
          "There is no time left for it in this join_pause, after another one. It is asked again.",
          "");
    } else {
      why = give_one(to, serving, *abort);
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      give_abort_.reset();
      if (!may_give_) {
        tried_.erase(to.incarnation);
      }
    }
    if (why) {
      log(LogLevel::Warn, "a newcomer, " + to.who() + ", did not get the members' state: " + why->text());
      inbox_->put(NotGiven{incarnationOf(to.incarnation), *std::move(why)});
    }
    longest = std::max(longest, Clock::now() - began);
  }
}

void AgreementDriver::give(std::string_view bytes) {
  giveEach([&](const MemberHandle& to, const Giving& giving, const AbortToken& abort) {
    return giveTo(to, giving, bytes, abort);
  });
}

void AgreementDriver::refuse(const std::string& why, size_t keep) {
  Giving kept;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto first_refused = batch_.to.begin() + static_cast<std::ptrdiff_t>(std::min(keep, batch_.to.size()));
    kept = batch_;
    kept.to.assign(batch_.to.begin(), first_refused);
    batch_.to.erase(batch_.to.begin(), first_refused);
  }
  giveEach([&](const MemberHandle& to, const Giving& giving, const AbortToken& /*abort*/) {
    refuseOne(to, giving, why);
    return record(ErrorCode::PeerLeft, why, "");
  });
  const std::lock_guard<std::mutex> lock(mutex_);
  batch_ = std::move(kept);
}

void AgreementDriver::stopGiving(const ErrorRecord& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopGivingLocked(why);
}

void AgreementDriver::stopGivingLocked(const ErrorRecord& why) {
  may_give_ = false;
  if (give_abort_ != nullptr) {
    (void)give_abort_->abort(why);
  }
}

void AgreementDriver::endGiving(const ErrorRecord& why) {
  waiting_.to.clear(); // nothing would end what begins now
  tried_.clear(); // the next view has a state of its own
  stopGivingLocked(why);
}

namespace {

void sayAtEndpoint(Link& link, const std::vector<std::string_view>& words, Deadline deadline, const AbortToken& abort) {
  if (askEndpoint(link, words, deadline, abort).front() != endpoint_answer::kHere) {
    throw Error(ErrorCode::PeerLeft, "it does not take the members' state");
  }
}

} // namespace

std::unique_ptr<Link> AgreementDriver::openToGive(const MemberHandle& to, Deadline deadline, const AbortToken& abort)
    const {
  const Visitor from = place_.visitor();
  Dialed dialed = dial(to, from, deadline, abort);
  if (dialed.link == nullptr) {
    throw Error(dialed.nobody_listens ? ErrorCode::PeerDead : ErrorCode::ConnectFailed, dialed.why);
  }
  const std::string self = from.self.text();
  sayAtEndpoint(*dialed.link, {endpoint_request::kGive, to.incarnation, from.self.incarnation, self}, deadline, abort);
  return std::move(dialed.link);
}

std::optional<ErrorRecord> AgreementDriver::giveTo(
    const MemberHandle& to,
    const Giving& giving,
    std::string_view bytes,
    const AbortToken& abort) {
  const Deadline deadline = Deadline::at(*giving.until);
  size_t given = 0;
  try {
    if (deadline.expired()) { // an endpoint that answers at once would take the state all the same, and get no reason
      throw Error(ErrorCode::Timeout, "the members have gone on");
    }
    const std::unique_ptr<Link> link = openToGive(to, deadline, abort);
    const std::string step = std::to_string(steps());
    const std::string view = std::to_string(static_cast<int64_t>(giving.view));
    const std::string epoch = std::to_string(giving.epoch);
    const std::string nbytes = std::to_string(bytes.size());
    std::vector<std::string_view> begin = {endpoint_request::kState, kStateBegins, step, view, epoch, nbytes};
    begin.insert(begin.end(), giving.roster.begin(), giving.roster.end());
    sayAtEndpoint(*link, begin, deadline, abort);
    while (given < bytes.size()) {
      PYCOMM_FAULT_POINT("survive.give");
      const std::string_view part = bytes.substr(given, kStatePartNbytes);
      sayAtEndpoint(*link, {endpoint_request::kState, kStatePart, part}, deadline, abort);
      given += part.size();
    }
    return std::nullopt;
  } catch (const Error& error) {
    if (!deadline.expired() && abort.aborted()) { // the epoch is over, or the newcomer silent, or a signal has come
      return std::nullopt;
    }
    if (!deadline.expired()) {
      return error.record();
    }
  }
  const std::string why = "The members' state has " + std::to_string(bytes.size()) + " bytes, of which " +
      std::to_string(given) + " reached this process within the " + secondsOf(config_.join_pause_ms) +
      " s for which they wait (join_pause, or at a join_point() the group's timeout). They go on without it. Try: longer ones on the members.";
  refuseOne(to, giving, why);
  return record(ErrorCode::PeerUnresponsive, why, "");
}

void AgreementDriver::refuseOne(const MemberHandle& to, const Giving& giving, const std::string& why) const noexcept {
  try {
    const std::string epoch = std::to_string(giving.epoch);
    const Deadline until = Deadline::after(kSayWhyMs);
    const AbortToken none;
    sayAtEndpoint(*openToGive(to, until, none), {endpoint_request::kState, kStateRefused, epoch, why}, until, none);
  } catch (const std::exception&) { // it is stopped, or gone
  }
}

// ---- the groups' thread

void AgreementDriver::writePeers(const std::vector<std::string>& handles, uint64_t epoch) {
  if (config_.peers_path.empty() || handles.front() != place_.handle()) {
    return;
  }
  std::string text = "# members of an elastic training, epoch " + std::to_string(epoch) + "\n";
  for (const std::string& handle : handles) {
    text += handle + "\n";
  }
  peers_.write(std::move(text));
}

} // namespace pycomm
