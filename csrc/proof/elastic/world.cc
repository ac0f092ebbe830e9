#include "proof/elastic/world.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>

#include "elastic/agreement.h"
#include "elastic/step_ledger.h"
#include "proof/elastic/oracle.h"

namespace pycomm::elastic::sim {
namespace {

using pycomm::sim::Random;
using Us = int64_t;

constexpr Us kGiveAgainUs = 100'000;
constexpr int kMostProcesses = 16;
constexpr Us kNever = INT64_MAX;

TimePoint instantOf(Us us) {
  return TimePoint(std::chrono::hours(1)) + std::chrono::microseconds(us);
}

uint64_t mix(uint64_t digest, uint64_t value) {
  uint64_t z = digest * 0x9e3779b97f4a7c15ULL + value + 0x632be59bd9b4e019ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  return z ^ (z >> 29);
}

struct Event {
  enum class Kind : uint8_t {
    Message, ///< arrives at p
    Tick,
    Sealed, ///< the planes of epoch `n` have failed all operations
    Forward, ///< p's program comes to a forward pass
    Begin, ///< and to a round: p has computed its gradients, or calls mean()
    Launch, ///< p launches bucket `other`
    BucketEnds,
    EnterCommit,
    CommitEnds,
    Boundary, ///< p's agreement learns that the epoch ends behind the commit round; `m`: it admits
    Linked, ///< p can reach the newcomer `other`
    Loaded, ///< newcomer p has all that `other` holds
    Silence, ///< p looks whether it has heard `other`
    LinkEnds, ///< p sees that the connections from `other` have ended
    Certificate, ///< the kernel tells p that `other` has ended
    Closes, ///< the user of p reacts to an error, or p's program ends
    Fault, ///< `n` of the plan
    FaultEnds,
    Restart, ///< a newcomer on the host of p
  };
  Us at = 0;
  int64_t serial = 0;
  Kind kind = Kind::Tick;
  int p = 0;
  int other = 0;
  uint64_t n = 0; ///< view, or fault
  int64_t m = 0; ///< step, or code
  std::shared_ptr<const Message> message;
};

Moment momentOf(Event::Kind kind, Round round) noexcept {
  switch (kind) {
    case Event::Kind::EnterCommit:
      return round == Round::Admission ? Moment::EntersAdmission : Moment::EntersCommit;
    case Event::Kind::CommitEnds:
      return round == Round::Admission ? Moment::AdmissionEnds : Moment::CommitEnds;
    case Event::Kind::Sealed:
      return Moment::Seals;
    case Event::Kind::Loaded:
      return Moment::Loads;
    default:
      return Moment::Any;
  }
}

const char* nameOf(Message::Kind kind) noexcept {
  static constexpr const char* kNames[] = {
      "?",
      "SUSPECT",
      "PREPARE",
      "PROMISE",
      "REFUSE",
      "ACCEPT",
      "ACCEPTED",
      "DECIDE",
      "EXCLUDED",
      "PING",
      "PONG",
      "JOIN",
      "GOODBYE"};
  return kNames[static_cast<size_t>(kind)];
}

struct Later {
  bool operator()(const Event& a, const Event& b) const noexcept {
    return a.at != b.at ? a.at > b.at : a.serial > b.serial;
  }
};

/// Whether nothing in this plan makes a process that lives seem dead.
bool keepsMembers(const Plan& plan) {
  int pauses = 0;
  for (const Fault& fault : plan.faults) {
    switch (fault.kind) {
      case Fault::Kind::Stop: // pauses of one process may follow each other, and then they are one
        if (fault.lasts_us >= plan.dead_after_ms * 1000 || ++pauses > 1) {
          return false;
        }
        break;
      case Fault::Kind::Cut:
      case Fault::Kind::Partition:
      case Fault::Kind::Reset:
      case Fault::Kind::FalseEnd:
        return false;
      case Fault::Kind::Kill:
      case Fault::Kind::ProgramError:
      case Fault::Kind::Leave:
      case Fault::Kind::Newcomer:
        break;
    }
  }
  return !plan.accept_split_brain;
}

struct Process {
  int host = 0;
  Incarnation self;
  bool running = false; ///< not ended
  bool stopped = false;
  bool joining = false;
  bool raised = false;
  bool trained = false; ///< all steps are committed
  bool leave_asked = false;
  std::optional<Agreement> agreement;
  StepLedger ledger;
  std::shared_ptr<const Record> record;
  std::vector<Event> deferred; ///< while it is stopped
  uint64_t view = 0; ///< of its operations
  std::vector<int> members; ///< processes
  size_t position = 0; ///< in the program: how many of its rounds are committed
  Round round = Round::Step; ///< that it makes, or made last
  bool admitting = false; ///< an Admission was due when its forward pass began, and it waits to begin that
  bool ahead = false; ///< the forward pass of its next step is under way: it gives no newcomer its state before that
  bool over = false; ///< no round begins before the next view
  bool agreeing = false;
  bool sealed = false;
  Us agreeing_since = 0;
  Us stopped_since = 0;
  Us installed_us = 0; ///< its view
  uint64_t chain = 0; ///< a digest of its parameters, and of the kinds of its rounds
  std::vector<uint64_t> results; ///< of the round's buckets
  Us tick_at = kNever;
  int actions_left = -1; ///< then it is killed
};

/// The operations of one round of one epoch.
struct RoundOps {
  std::vector<std::set<int>> launched; ///< by bucket
  std::set<int> entered;
  Wish all{.leaves = false, .admits = true};
};

class World {
 public:
  World(const Plan& plan, bool trace) : plan_(plan), dice_(Random(~plan.seed).next()), oracle_(plan), trace_(trace) {
    for (auto& row : cut_) {
      std::fill(std::begin(row), std::end(row), 0);
    }
    for (auto& row : silent_since_) {
      std::fill(std::begin(row), std::end(row), kNever);
    }
    for (auto& row : last_arrival_) {
      std::fill(std::begin(row), std::end(row), 0);
    }
    for (auto& row : pair_delay_) {
      for (Us& delay : row) {
        delay = 1 + dice_.scaled(plan.delay_us / 2, plan.delay_us * 2);
      }
    }
  }

  Report run();

 private:
  [[nodiscard]] Agreement::Config configOf(int p) const {
    Agreement::Config config;
    config.self = processes_[static_cast<size_t>(p)].self;
    config.min_ranks = static_cast<size_t>(plan_.min_ranks);
    config.accept_split_brain = plan_.accept_split_brain;
    config.dead_after_ms = plan_.dead_after_ms;
    config.quorum_wait_ms = plan_.quorum_wait_ms;
    config.join_pause_ms = plan_.join_pause_ms;
    config.join_wait_ms = 20'000;
    return config;
  }
  Process& of(int p) {
    return processes_[static_cast<size_t>(p)];
  }
  [[nodiscard]] TimePoint now() const {
    return instantOf(now_us_);
  }
  int64_t jitter(Us about) {
    return 1 + dice_.scaled(about / 4, about * 2);
  }
  Event& at(Us when, Event::Kind kind, int p, int other = -1, uint64_t n = 0, int64_t m = 0) {
    Event event;
    event.at = std::max(when, now_us_);
    event.serial = ++serial_;
    event.kind = kind;
    event.p = p;
    event.other = other;
    event.n = n;
    event.m = m;
    pending_.push_back(event);
    return pending_.back();
  }
  Event& after(Us delay, Event::Kind kind, int p, int other = -1, uint64_t n = 0, int64_t m = 0) {
    return at(now_us_ + delay, kind, p, other, n, m);
  }
  void giveReason(const Process& process, bool of_connection = false) {
    oracle_.reason(process.view);
    if (process.agreeing && !of_connection) { // the next members make connections of their own
      oracle_.lateReason(process.view);
    }
  }
  void say(const std::string& what) {
    if (trace_) {
      report_.trace.push_back("  " + std::to_string(now_us_) + " us: " + what);
    }
  }

  void start();
  int addProcess(int host);
  void startNewcomer(int host);
  void handle(const Event& event);
  void handleOf(Process& process, const Event& event);
  void act(int p);
  void transmit(int from, int to, const std::shared_ptr<const Message>& message);
  void installs(int p, const View& view);
  void commits(int p, uint64_t view, const std::vector<int>& members, bool by_round);
  void catchUp(Process& process);
  void goOn(int p);
  void forward(int p);
  void goAhead(int p);
  void launchAll(int p, Round round);
  [[nodiscard]] Us give(int p);
  [[nodiscard]] size_t bucketsOf(Round round) const;
  [[nodiscard]] bool mayBegin(const Process& process) const {
    return !process.over && process.agreement->mayBegin();
  }
  /// Whether the program comes to a forward pass next.
  [[nodiscard]] bool atForward(const Process& process) const {
    return process.position < plan_.program.size() && plan_.program[process.position] == Round::Step && !process.ahead;
  }
  void kill(int p, bool closed);
  void strike(size_t index);
  void ends(size_t index);
  void setCut(int from, int to, bool cut);
  void heardChanged();
  void contactChanged(int from, int to);
  void scheduleTick(int p);
  [[nodiscard]] bool mayEnd(const Event& event);
  [[nodiscard]] bool audible(int from, int to) {
    return of(from).running && !of(from).stopped && of(to).running && !of(to).stopped && cut_[from][to] == 0;
  }
  [[nodiscard]] bool watches(int p, int other) {
    const Process& process = of(p);
    return process.agreement && !process.raised && (process.agreement->view().has(of(other).self) || of(other).joining);
  }
  [[nodiscard]] bool newestHasBeenReachable(int p);
  void judge();
  void judgeProgress();

  const Plan& plan_;
  Random dice_;
  Oracle oracle_;
  bool trace_;
  Report report_;
  Us now_us_ = 0;
  int64_t serial_ = 0;
  std::vector<Event> pending_;
  std::priority_queue<Event, std::vector<Event>, Later> queue_;
  std::vector<Process> processes_;
  std::map<std::pair<uint64_t, int64_t>, RoundOps> ops_; ///< by view and step
  int cut_[kMostProcesses][kMostProcesses];
  Us silent_since_[kMostProcesses][kMostProcesses]; ///< by listener and speaker
  Us last_arrival_[kMostProcesses][kMostProcesses];
  Us pair_delay_[kMostProcesses][kMostProcesses];
  std::map<std::pair<int, int>, std::vector<std::shared_ptr<const Message>>> held_;
  std::vector<bool> struck_;
  std::vector<size_t> by_count_; ///< faults that strike after a number of events
  int64_t moments_[kMoments] = {}; ///< how many events there were of each
  Us last_fault_us_ = 0;
  int open_faults_ = 0; ///< that have not begun, or will end
};

int World::addProcess(int host) {
  const int p = static_cast<int>(processes_.size());
  Process& process = processes_.emplace_back();
  process.host = host;
  process.self = Incarnation{plan_.seed, static_cast<uint64_t>(p) + 1};
  process.running = true;
  return p;
}

void World::start() {
  processes_.reserve(kMostProcesses);
  View first;
  for (int p = 0; p < plan_.processes; ++p) {
    addProcess(plan_.hosts[static_cast<size_t>(p)]);
    first.members.push_back(of(p).self);
  }
  for (int p = 0; p < plan_.processes; ++p) {
    Process& process = of(p);
    process.agreement.emplace(configOf(p), first, now());
    process.view = first.id();
    for (int member = 0; member < plan_.processes; ++member) {
      process.members.push_back(member);
    }
    oracle_.started(p, first);
    act(p);
    goOn(p);
  }
  struck_.assign(plan_.faults.size(), false);
  for (size_t i = 0; i < plan_.faults.size(); ++i) {
    const Fault& fault = plan_.faults[i];
    at(fault.at_us + (fault.after_events > 0 ? 2'000'000 : 0), Event::Kind::Fault, 0, 0, i);
    if (fault.after_events > 0) {
      by_count_.push_back(i);
    }
    ++open_faults_;
  }
}

void World::startNewcomer(int host) {
  if (processes_.size() >= kMostProcesses) {
    return;
  }
  const int p = addProcess(host);
  Process& process = of(p);
  process.joining = true;
  oracle_.newcomer();
  std::vector<Incarnation> contacts;
  for (int other = 0; other < p; ++other) {
    if (of(other).running) {
      contacts.push_back(of(other).self);
    }
  }
  say("process " + std::to_string(p) + " starts and asks to join");
  process.agreement.emplace(configOf(p), std::move(contacts), now());
  contactChanged(p, p);
  act(p);
}

// ---- events

Report World::run() {
  start();
  const auto drain = [&] {
    for (Event& event : pending_) {
      queue_.push(std::move(event));
    }
    pending_.clear();
  };
  drain();
  // Within which a quorum that is connected goes on.
  const Us quiet = Us{plan_.dead_after_ms} * 1000 + 2'500'000;
  bool judged = false;
  while (!queue_.empty() && oracle_.violations().empty()) {
    Event event = queue_.top();
    queue_.pop();
    if (open_faults_ == 0 && !judged && event.at > last_fault_us_ + quiet) {
      judged = true;
      now_us_ = last_fault_us_ + quiet;
      judgeProgress();
    }
    now_us_ = event.at;
    if (++report_.events > 200'000) {
      oracle_.violation("M8: the run does not end");
      break;
    }
    const bool of_process = event.p >= 0 && event.p < static_cast<int>(processes_.size());
    const Round round = of_process ? of(event.p).round : Round::Step;
    handle(event);
    moments_[static_cast<size_t>(Moment::Any)] = report_.events;
    if (const Moment moment = momentOf(event.kind, round); moment != Moment::Any) {
      ++moments_[static_cast<size_t>(moment)];
    }
    for (const size_t i : by_count_) {
      const Fault& fault = plan_.faults[i];
      if (!struck_[i] && moments_[static_cast<size_t>(fault.moment)] >= fault.after_events) {
        strike(i);
      }
    }
    drain();
  }
  judge();
  report_.violations = oracle_.violations();
  return std::move(report_);
}

void World::handle(const Event& event) {
  switch (event.kind) {
    case Event::Kind::Fault:
      strike(event.n);
      return;
    case Event::Kind::FaultEnds:
      ends(event.n);
      return;
    case Event::Kind::Restart:
      last_fault_us_ = now_us_;
      --open_faults_;
      startNewcomer(event.other);
      return;
    default:
      break;
  }
  Process& process = of(event.p);
  if (!process.running) {
    return;
  }
  if (process.stopped) {
    if (event.kind == Event::Kind::Tick) {
      process.tick_at = kNever;
    }
    process.deferred.push_back(event);
    return;
  }
  report_.digest =
      mix(report_.digest,
          static_cast<uint64_t>(event.at) ^ (static_cast<uint64_t>(event.kind) << 56) ^
              static_cast<uint64_t>(event.p) << 48);
  handleOf(process, event);
  act(event.p);
}

void World::handleOf(Process& process, const Event& event) {
  Agreement& agreement = *process.agreement;
  const bool current = event.n == process.view && !process.sealed;
  const bool in_epoch = event.n == process.view && !process.agreeing && !process.raised && !process.ledger.hasLeft();
  const bool is_next = event.m == process.ledger.state().committed + 1;
  catchUp(process);
  switch (event.kind) {
    case Event::Kind::Message:
      ++report_.messages;
      if (trace_) {
        say("process " + std::to_string(event.p) + " gets " + nameOf(event.message->kind) + " of process " +
            std::to_string(event.other));
      }
      agreement.received(*event.message, now());
      return;
    case Event::Kind::Tick:
      if (event.at == process.tick_at || process.tick_at == kNever) {
        process.tick_at = kNever;
        agreement.tick(now());
      }
      return;
    case Event::Kind::Sealed:
      if (event.n == process.view && process.agreeing) {
        process.sealed = true;
        (void)process.ledger.seal();
        agreement.sealed(now());
      }
      return;
    case Event::Kind::Forward:
      if (in_epoch && is_next) {
        forward(event.p);
      }
      return;
    case Event::Kind::Begin:
      if (in_epoch && is_next && mayBegin(process)) { // else it waits for the next view
        launchAll(event.p, plan_.program[process.position]);
      } else if (in_epoch && is_next && !process.ahead) { // in the place of a mean nobody gives a state
        agreement.awaitStep(true);
      } else if (in_epoch && is_next && !process.over && process.ahead) { // too few give their state to each that comes
        after(give(event.p) + kGiveAgainUs, Event::Kind::Begin, event.p, -1, process.view, event.m);
      }
      return;
    case Event::Kind::Launch: {
      if (!current) {
        return;
      }
      RoundOps& ops = ops_[{process.view, event.m}];
      ops.launched.resize(bucketsOf(process.round));
      std::set<int>& launched = ops.launched[static_cast<size_t>(event.other)];
      launched.insert(event.p);
      if (launched.size() == process.members.size()) {
        for (const int member : process.members) {
          after(jitter(plan_.delay_us), Event::Kind::BucketEnds, member, event.other, event.n, event.m);
        }
      }
      return;
    }
    case Event::Kind::BucketEnds:
      if (current && is_next && mayEnd(event)) {
        oracle_.endsWell(event.p, event.n);
        uint64_t sum = mix(static_cast<uint64_t>(event.m), static_cast<uint64_t>(event.other));
        for (const int member : process.members) {
          sum = mix(sum, static_cast<uint64_t>(member));
        }
        process.results[static_cast<size_t>(event.other)] = sum;
        if (std::count(process.results.begin(), process.results.end(), 0U) == 0) {
          after(jitter(plan_.delay_us / 4), Event::Kind::EnterCommit, event.p, -1, event.n, event.m);
        }
      }
      return;
    case Event::Kind::EnterCommit: {
      const std::optional<Wish> wish =
          current && is_next ? process.ledger.finish(agreement.view().epoch) : std::nullopt;
      if (!wish) {
        return;
      }
      oracle_.finishes(event.p, event.n, event.m);
      oracle_.wishes(event.n, event.m, *wish);
      if (wish->leaves) {
        oracle_.leaves(event.p, now_us_, event.m, process.round);
      }
      RoundOps& ops = ops_[{process.view, event.m}];
      ops.entered.insert(event.p);
      ops.all.leaves = ops.all.leaves || wish->leaves;
      ops.all.admits = ops.all.admits && wish->admits;
      if (ops.entered.size() == process.members.size()) {
        for (const int member : process.members) {
          after(jitter(plan_.delay_us), Event::Kind::CommitEnds, member, -1, event.n, event.m);
        }
      }
      return;
    }
    case Event::Kind::CommitEnds:
      if (current && is_next && mayEnd(event)) {
        oracle_.endsWell(event.p, event.n);
        using Committed = StepLedger::Committed;
        const Committed committed = process.ledger.commit(agreement.view().epoch, ops_[{process.view, event.m}].all);
        if (committed == Committed::TooLate) {
          return;
        }
        commits(event.p, process.view, process.members, true);
        if (committed == Committed::GoesOn) {
          goOn(event.p);
          return;
        }
        process.over = true;
        oracle_.reason(process.view);
        const bool admits = committed == Committed::Admits;
        if (admits) {
          oracle_.stops(event.p, event.n, event.m, atForward(process));
        }
        after(jitter(plan_.delay_us / 4), Event::Kind::Boundary, event.p, -1, event.n, admits ? 1 : 0);
      }
      return;
    case Event::Kind::Boundary: // before the program asks who loads: AgreementDriver::newcomers() waits for it
      if (event.n == process.view) {
        agreement.boundary(now(), event.m != 0);
        goOn(event.p);
      }
      return;
    case Event::Kind::Linked:
      if (of(event.other).running && audible(event.other, event.p) && cut_[event.p][event.other] == 0) {
        agreement.linked(of(event.other).self, now());
      }
      return;
    case Event::Kind::Loaded: {
      const Process& donor = of(event.other);
      if (process.joining && donor.view == event.n && !donor.agreeing && audible(event.other, event.p)) {
        process.chain = donor.chain;
        process.position = donor.position;
        process.ledger.load(event.m);
        say("process " + std::to_string(event.p) + " has loaded step " + std::to_string(event.m));
        oracle_.loads(event.p, event.m);
        agreement.loaded(event.m, event.n, now());
      }
      return;
    }
    case Event::Kind::Silence:
      if (silent_since_[event.p][event.other] != kNever && watches(event.p, event.other) &&
          now_us_ - silent_since_[event.p][event.other] >= plan_.dead_after_ms * 1000) {
        say("process " + std::to_string(event.p) + " has not heard process " + std::to_string(event.other));
        giveReason(process);
        agreement.failed(ErrorCode::PeerUnresponsive, of(event.other).self, now());
      }
      return;
    case Event::Kind::LinkEnds:
      if (watches(event.p, event.other)) {
        const auto code = static_cast<ErrorCode>(event.m);
        say("process " + std::to_string(event.p) + " sees " + errorCodeName(code) + " of process " +
            std::to_string(event.other));
        giveReason(process, code == ErrorCode::ConnectionReset);
        agreement.failed(code, of(event.other).self, now());
      }
      return;
    case Event::Kind::Certificate:
      if (watches(event.p, event.other) && of(event.other).record) {
        say("process " + std::to_string(event.p) + " learns from the kernel of the end of process " +
            std::to_string(event.other));
        oracle_.certificate(event.p, event.other);
        giveReason(process);
        agreement.certified(of(event.other).self, *of(event.other).record, now());
      }
      return;
    case Event::Kind::Closes:
      agreement.close(now());
      act(event.p);
      if (process.running) {
        kill(event.p, true);
      }
      return;
    case Event::Kind::Fault:
    case Event::Kind::FaultEnds:
    case Event::Kind::Restart:
      return;
  }
}

// ---- the step

/// Where a member has died, an operation that all have entered may end on some and not on others. Where one cannot be reached, it may end
/// late.
bool World::mayEnd(const Event& event) {
  const Process& process = of(event.p);
  const bool alive =
      std::all_of(process.members.begin(), process.members.end(), [&](int member) { return of(member).running; });
  if (!alive) {
    return dice_.chance(50);
  }
  const bool cut = std::any_of(process.members.begin(), process.members.end(), [&](int member) {
    return cut_[member][event.p] != 0 || cut_[event.p][member] != 0;
  });
  if (cut && dice_.chance(70)) {
    after(50'000, event.kind, event.p, event.other, event.n, event.m);
    return false;
  }
  return true;
}

/// As AgreementDriver: before each event.
void World::catchUp(Process& process) {
  process.agreement->step(process.ledger.state());
  if (process.ledger.leaves()) {
    process.agreement->leave();
  }
}

/// What the program does next, once a round is committed or a view is there.
void World::goOn(int p) {
  Process& process = of(p);
  if (process.position >= plan_.program.size()) {
    process.trained = true;
    after(jitter(plan_.delay_us * 4), Event::Kind::Closes, p);
    return;
  }
  const int64_t next = process.ledger.state().committed + 1;
  if (atForward(process)) {
    after(jitter(plan_.delay_us), Event::Kind::Forward, p, -1, process.view, next);
  } else {
    after(
        jitter(process.ahead ? plan_.compute_us : plan_.compute_us / 4), Event::Kind::Begin, p, -1, process.view, next);
  }
}

/// As Reducer::awaitNewcomers(), and what comes behind it.
void World::forward(int p) {
  Process& process = of(p);
  process.admitting = process.admitting || process.ledger.admissionIsDue();
  if (process.admitting) {
    if (process.over) {
      return; // it waits for the next view
    }
    process.admitting = false;
    if (process.ledger.admissionIsDue()) {
      launchAll(p, Round::Admission);
      return;
    }
  }
  goAhead(p);
}

void World::goAhead(int p) {
  Process& process = of(p);
  process.ahead = true;
  const int64_t next = process.ledger.state().committed + 1;
  after(give(p) + jitter(plan_.compute_us), Event::Kind::Begin, p, -1, process.view, next);
}

size_t World::bucketsOf(Round round) const {
  switch (round) {
    case Round::Step:
      return static_cast<size_t>(plan_.buckets);
    case Round::BetweenSteps:
      return 1;
    case Round::Admission:
      return 0;
  }
  return 0;
}

void World::launchAll(int p, Round round) {
  Process& process = of(p);
  const int64_t step = process.ledger.state().committed + 1;
  process.round = round;
  process.results.assign(bucketsOf(round), 0);
  oracle_.begins(p, process.agreement->view(), step, round, process.position);
  process.ledger.launch(round);
  if (round == Round::Admission) {
    ++report_.admissions;
    after(jitter(plan_.delay_us / 4), Event::Kind::EnterCommit, p, -1, process.view, step);
  }
  Us delay = 0;
  for (int bucket = 0; bucket < static_cast<int>(bucketsOf(round)); ++bucket) {
    delay += dice_.below(plan_.compute_us / 4 + 2);
    after(delay, Event::Kind::Launch, p, bucket, process.view, step);
  }
}

void World::commits(int p, uint64_t view, const std::vector<int>& members, bool by_round) {
  Process& process = of(p);
  const int64_t step = process.ledger.state().committed;
  process.chain = mix(process.chain, static_cast<uint64_t>(process.round));
  for (const uint64_t result : process.results) {
    process.chain = mix(process.chain, result);
  }
  process.position += process.round == Round::Admission ? 0 : 1;
  process.ahead = process.ahead && process.round != Round::Step;
  say("process " + std::to_string(p) + " commits step " + std::to_string(step) + (by_round ? "" : " by the new view"));
  ++report_.committed;
  oracle_.commits(p, view, step, process.chain, by_round, members);
}

void World::installs(int p, const View& view) {
  Process& process = of(p);
  const uint64_t before = process.view;
  const bool newcomer = std::exchange(process.joining, false);
  say("process " + std::to_string(p) + " installs epoch " + std::to_string(view.epoch) + " of " +
      std::to_string(view.members.size()) + " members after step " + std::to_string(view.step) + ", " +
      errorCodeName(view.cause));
  ++report_.agreements;
  report_.joined += newcomer ? 1 : 0;
  oracle_.installs(p, view, newcomer, process.chain);
  if (process.agreeing) {
    const Us took = now_us_ - process.agreeing_since;
    if (took > (Agreement::kMostQuorumWaits * plan_.quorum_wait_ms + 500) * 1000) {
      oracle_.violation("M8: process " + std::to_string(p) + " has agreed for " + std::to_string(took) + " us");
    }
  }
  std::vector<int> old_members = std::exchange(process.members, {});
  process.view = view.id();
  process.installed_us = now_us_;
  for (const Incarnation& member : view.members) {
    process.members.push_back(Oracle::processOf(member));
  }
  process.over = false;
  process.agreeing = false;
  process.sealed = false;
  // Connections to those who are not in it end.
  for (const int old : old_members) {
    if (!view.has(of(old).self) && of(old).running) {
      after(jitter(plan_.delay_us), Event::Kind::LinkEnds, old, p, 0, static_cast<int64_t>(ErrorCode::ConnectionReset));
    }
  }
  switch (process.ledger.install(view)) {
    case StepLedger::Outcome::Commit: {
      std::vector<int> stay;
      for (const int member : process.members) {
        if (std::find(old_members.begin(), old_members.end(), member) != old_members.end()) {
          stay.push_back(member);
        }
      }
      commits(p, before, stay, false);
      goOn(p);
      break;
    }
    case StepLedger::Outcome::Redo:
      ++report_.redone;
      oracle_.redoes(p, view, process.ledger.state().committed + 1);
      if (process.agreement->mayBegin()) {
        launchAll(p, process.round);
      }
      break;
    case StepLedger::Outcome::Nothing:
      goOn(p);
      break;
  }
  // The detector begins anew, and finds members that have been dead or silent again.
  for (const int member : process.members) {
    if (member != p) {
      contactChanged(p, member);
    }
  }
}

/// To newcomers that load now, one after the other: how long that takes. Rank 0 does it, as its forward pass begins.
Us World::give(int p) {
  Process& process = of(p);
  Us takes = 0;
  if (process.agreement->view().position(process.self) != 0) {
    return takes;
  }
  const std::vector<Incarnation> loading = process.agreement->loading();
  process.agreement->awaitStep(false);
  for (const Incarnation& newcomer : loading) {
    takes += jitter(plan_.delay_us * 20);
    const int to = Oracle::processOf(newcomer);
    after(takes, Event::Kind::Loaded, to, p, process.view, process.ledger.state().committed);
  }
  return takes;
}

// ---- actions

void World::act(int p) {
  Process& process = of(p);
  if (!process.agreement) {
    return;
  }
  for (;;) {
    std::vector<Agreement::Action> actions = process.agreement->takeActions();
    if (actions.empty()) {
      break;
    }
    for (Agreement::Action& action : actions) {
      if (!process.running) {
        return;
      }
      if (process.actions_left == 0) {
        kill(p, false);
        return;
      }
      process.actions_left -= process.actions_left > 0 ? 1 : 0;
      switch (action.kind) {
        case Agreement::Action::Kind::Send:
          oracle_.sends(p, *action.message);
          for (const Incarnation& to : action.to) {
            transmit(p, Oracle::processOf(to), action.message);
          }
          break;
        case Agreement::Action::Kind::Keep:
          process.record = action.record;
          oracle_.keeps(p, *action.record);
          break;
        case Agreement::Action::Kind::Seal:
          say("process " + std::to_string(p) + " ends its epoch");
          process.over = true;
          process.agreeing = true;
          process.agreeing_since = now_us_;
          oracle_.seals(p, process.agreement->view(), now_us_);
          after(
              dice_.chance(5) ? dice_.within(1, 300'000) : jitter(plan_.delay_us),
              Event::Kind::Sealed,
              p,
              -1,
              process.view);
          break;
        case Agreement::Action::Kind::Install:
          installs(p, action.view);
          break;
        case Agreement::Action::Kind::Link:
          after(jitter(plan_.delay_us * 10), Event::Kind::Linked, p, Oracle::processOf(action.of));
          break;
        case Agreement::Action::Kind::Raise:
          oracle_.raises(p, action.error, action.view, newestHasBeenReachable(p));
          if (action.error == Agreement::Action::Error::LeftBehind && keepsMembers(plan_)) {
            oracle_.violation("M9: process " + std::to_string(p) + " is left behind, although all have heard it");
          }
          if (action.error == Agreement::Action::Error::Left) {
            const StepState before = process.ledger.state();
            process.ledger.left(action.view);
            if (process.ledger.state().committed > before.committed) {
              commits(p, process.view, {p}, false);
            } else if (before.launched) {
              oracle_.violation("L1: process " + std::to_string(p) + " leaves in the middle of a step");
            }
          }
          process.raised = true;
          ++report_.raised;
          say("process " + std::to_string(p) + " raises " + std::to_string(static_cast<int>(action.error)));
          after(jitter(plan_.delay_us * 10), Event::Kind::Closes, p);
          break;
      }
    }
  }
  process.ledger.setAdmits(process.agreement->admits());
  scheduleTick(p);
}

void World::scheduleTick(int p) {
  Process& process = of(p);
  const TimePoint next = process.agreement->nextTick();
  if (next == TimePoint::max()) {
    process.tick_at = kNever;
    return;
  }
  const Us due =
      std::max<Us>(now_us_, std::chrono::duration_cast<std::chrono::microseconds>(next - instantOf(0)).count() + 1);
  if (due < process.tick_at) {
    process.tick_at = due;
    at(due, Event::Kind::Tick, p);
  }
}

void World::transmit(int from, int to, const std::shared_ptr<const Message>& message) {
  if (to < 0 || to >= static_cast<int>(processes_.size()) || !of(to).running) {
    return;
  }
  if (cut_[from][to] != 0) {
    if (!plan_.lossy) {
      held_[{from, to}].push_back(message);
    }
    return;
  }
  const int copies = !plan_.fifo && dice_.chance(5) ? 2 : 1;
  for (int i = 0; i < copies; ++i) {
    Us arrives = now_us_ + dice_.within(pair_delay_[from][to] / 2, pair_delay_[from][to] * 3 / 2);
    if (dice_.chance(plan_.slow_percent)) {
      arrives += dice_.within(0, 300'000);
    }
    if (plan_.fifo) {
      arrives = std::max(arrives, last_arrival_[from][to]);
      last_arrival_[from][to] = arrives;
    }
    std::shared_ptr<const Message> as_read = message;
    if (plan_.through_wire) {
      const std::optional<Message> read = decodeMessage(encode(*message));
      if (!read) {
        oracle_.violation("wire: a message cannot be read");
        return;
      }
      as_read = std::make_shared<const Message>(*read);
    }
    at(arrives, Event::Kind::Message, to, from).message = std::move(as_read);
  }
}

// ---- faults

void World::kill(int p, bool closed) {
  Process& process = of(p);
  if (!process.running) {
    return;
  }
  say("process " + std::to_string(p) + (closed ? " closes" : " is killed"));
  process.running = false;
  process.deferred.clear();
  last_fault_us_ = now_us_;
  oracle_.ended(p);
  for (int other = 0; other < static_cast<int>(processes_.size()); ++other) {
    if (other != p && of(other).running) {
      contactChanged(other, p);
    }
  }
  heardChanged();
}

/// What `p` will learn of `other` by itself.
void World::contactChanged(int p, int other) {
  if (p == other) {
    heardChanged();
    return;
  }
  if (!of(other).running && of(p).running) {
    if (cut_[other][p] == 0) {
      Us delay = jitter(plan_.delay_us * 4);
      if (dice_.chance(20)) {
        after(delay, Event::Kind::LinkEnds, p, other, 0, static_cast<int64_t>(ErrorCode::ConnectionReset));
        delay += 500'000;
      }
      after(delay, Event::Kind::LinkEnds, p, other, 0, static_cast<int64_t>(ErrorCode::PeerDead));
    }
    if (plan_.certifies && of(p).host == of(other).host) {
      after(dice_.within(10, plan_.certificate_us), Event::Kind::Certificate, p, other);
    }
  }
  if (silent_since_[p][other] != kNever) {
    const Us found = silent_since_[p][other] + plan_.dead_after_ms * 1000 + dice_.within(0, 500'000);
    at(std::max(found, now_us_ + 1000), Event::Kind::Silence, p, other);
  }
}

void World::heardChanged() {
  const int count = static_cast<int>(processes_.size());
  for (int p = 0; p < count; ++p) {
    for (int other = 0; other < count; ++other) {
      if (p == other || !of(p).running || of(p).stopped) {
        continue;
      }
      Us& since = silent_since_[p][other];
      const bool heard = audible(other, p);
      if (heard) {
        since = kNever;
      } else if (since == kNever) {
        since = now_us_;
        after(plan_.dead_after_ms * 1000 + dice_.within(0, 500'000), Event::Kind::Silence, p, other);
      }
    }
  }
}

void World::setCut(int from, int to, bool cut) {
  if (cut && cut_[from][to]++ == 0) {
    oracle_.cut(from, to, now_us_);
  } else if (!cut && --cut_[from][to] == 0) {
    oracle_.healed(from, to);
    for (const auto& message : std::exchange(held_[{from, to}], {})) {
      transmit(from, to, message);
    }
  }
}

void World::strike(size_t index) {
  if (struck_[index]) {
    return;
  }
  struck_[index] = true;
  --open_faults_;
  last_fault_us_ = now_us_;
  const Fault& fault = plan_.faults[index];
  Process& process = of(fault.process);
  const int count = static_cast<int>(processes_.size());
  say("fault " + std::to_string(index));
  switch (fault.kind) {
    case Fault::Kind::Kill:
      if (!process.running) {
        return;
      }
      if (fault.after_actions >= 0) {
        process.actions_left = fault.after_actions;
      } else {
        kill(fault.process, false);
      }
      if (fault.restart_us > 0) {
        ++open_faults_;
        after(fault.restart_us, Event::Kind::Restart, fault.process, process.host);
      }
      return;
    case Fault::Kind::Stop:
      if (process.running && !process.stopped) {
        process.stopped = true;
        process.stopped_since = now_us_;
        heardChanged();
        ++open_faults_;
        after(fault.lasts_us, Event::Kind::FaultEnds, 0, 0, index);
      }
      return;
    case Fault::Kind::Cut:
    case Fault::Kind::Partition:
      for (int from = 0; from < count; ++from) {
        for (int to = 0; to < count; ++to) {
          const bool pair = from == fault.process && to == fault.other;
          const bool back = fault.both && from == fault.other && to == fault.process;
          const bool in_side = (fault.side >> from & 1U) != 0;
          const bool to_side = (fault.side >> to & 1U) != 0;
          const bool across = in_side != to_side && (fault.both || in_side);
          if (fault.kind == Fault::Kind::Cut ? pair || back : across && from != to) {
            setCut(from, to, true);
          }
        }
      }
      heardChanged();
      if (fault.lasts_us > 0) {
        ++open_faults_;
        after(fault.lasts_us, Event::Kind::FaultEnds, 0, count, index);
      }
      return;
    case Fault::Kind::Reset:
      after(1, Event::Kind::LinkEnds, fault.process, fault.other, 0, static_cast<int64_t>(ErrorCode::ConnectionReset));
      after(
          jitter(plan_.delay_us),
          Event::Kind::LinkEnds,
          fault.other,
          fault.process,
          0,
          static_cast<int64_t>(ErrorCode::ConnectionReset));
      return;
    case Fault::Kind::FalseEnd:
      after(1, Event::Kind::LinkEnds, fault.other, fault.process, 0, static_cast<int64_t>(ErrorCode::PeerDead));
      return;
    case Fault::Kind::ProgramError: {
      static constexpr ErrorCode kCodes[] = {
          ErrorCode::CollectiveMismatch,
          ErrorCode::Timeout,
          ErrorCode::DataCorrupt,
          ErrorCode::OutOfMemory,
          ErrorCode::Aborted};
      if (process.running && !process.stopped && !process.agreeing) {
        process.agreement->failed(kCodes[fault.code], of(fault.other).self, now());
        act(fault.process);
        oracle_.programError(fault.process, process.agreeing);
      }
      return;
    }
    case Fault::Kind::Leave:
      if (process.running && process.agreement) {
        process.leave_asked = true;
        process.ledger.leave();
      }
      return;
    case Fault::Kind::Newcomer:
      startNewcomer(process.host);
      return;
  }
}

void World::ends(size_t index) {
  --open_faults_;
  last_fault_us_ = now_us_;
  const Fault& fault = plan_.faults[index];
  say("fault " + std::to_string(index) + " ends");
  if (fault.kind == Fault::Kind::Stop) {
    Process& process = of(fault.process);
    process.stopped = false;
    if (!process.running) {
      return;
    }
    const Us slept = now_us_ - process.stopped_since;
    process.agreeing_since += process.agreeing ? slept : 0;
    for (int other = 0; other < static_cast<int>(processes_.size()); ++other) {
      silent_since_[fault.process][other] = kNever; // it forgives what it slept through
    }
    heardChanged();
    std::vector<Event> deferred = std::exchange(process.deferred, {});
    for (Event& event : deferred) {
      at(now_us_ + (event.kind == Event::Kind::Tick ? dice_.below(50) : 10),
         event.kind,
         event.p,
         event.other,
         event.n,
         event.m)
          .message = event.message;
    }
    scheduleTick(fault.process);
    return;
  }
  const int count = static_cast<int>(processes_.size());
  for (int from = 0; from < count; ++from) {
    for (int to = 0; to < count; ++to) {
      const bool pair = from == fault.process && to == fault.other;
      const bool back = fault.both && from == fault.other && to == fault.process;
      const bool in_side = from < plan_.processes && (fault.side >> from & 1U) != 0;
      const bool to_side = to < plan_.processes && (fault.side >> to & 1U) != 0;
      const bool across = in_side != to_side && (fault.both || in_side);
      if ((fault.kind == Fault::Kind::Cut ? pair || back : across && from != to) && cut_[from][to] > 0) {
        setCut(from, to, false);
      }
    }
  }
  heardChanged();
}

// ---- the end

/// By somebody whom p knows, for as long as a question and its repetition take.
bool World::newestHasBeenReachable(int p) {
  constexpr Us kLong = 2'500'000;
  const View& view = oracle_.newest();
  return last_fault_us_ + kLong < now_us_ &&
      std::any_of(
             view.members.begin(),
             view.members.end(),
             [&](const Incarnation& member) {
               const int other = Oracle::processOf(member);
               const Process& process = of(other);
               return of(p).agreement->view().has(member) && process.running && !process.stopped && !process.raised &&
                   process.view == view.id() && process.installed_us + kLong < now_us_ && cut_[p][other] == 0 &&
                   cut_[other][p] == 0;
             });
}

/// Long enough after the last fault: where the newest view has a quorum that is alive and whose members reach each other, nobody of it is
/// still agreeing.
void World::judgeProgress() {
  const View& view = oracle_.newest();
  std::vector<int> alive;
  for (const Incarnation& member : view.members) {
    const int p = Oracle::processOf(member);
    if (of(p).running && !of(p).stopped && !of(p).raised && of(p).view == view.id()) {
      alive.push_back(p);
    }
  }
  for (const int a : alive) {
    for (const int b : alive) {
      if (cut_[a][b] != 0) {
        return; // which of them go on is for them to decide
      }
    }
  }
  if (!oracle_.knownQuorum(view, {alive.begin(), alive.end()})) {
    return;
  }
  for (const int p : alive) {
    if (of(p).agreeing && !of(p).leave_asked && now_us_ - of(p).agreeing_since > 2'000'000) {
      oracle_.violation("M8: process " + std::to_string(p) + " still agrees although a quorum is alive and connected");
    }
  }
}

void World::judge() {
  for (int p = 0; p < static_cast<int>(processes_.size()); ++p) {
    const Process& process = of(p);
    if (process.running && !process.raised && !process.trained && oracle_.violations().empty()) {
      oracle_.violation(
          "M8: process " + std::to_string(p) + " neither goes on nor raises, in epoch " +
          std::to_string(process.agreement->view().epoch));
    }
  }
  const bool nobody_goes = std::all_of(plan_.faults.begin(), plan_.faults.end(), [](const Fault& fault) {
    return fault.kind == Fault::Kind::Stop || fault.kind == Fault::Kind::ProgramError;
  });
  const bool ended_early =
      std::any_of(processes_.begin(), processes_.end(), [&](const Process& each) { return !each.trained; });
  if (nobody_goes && keepsMembers(plan_) &&
      (oracle_.newest().epoch > static_cast<uint64_t>(plan_.processes) || ended_early)) {
    oracle_.violation("M9: a member is lost without a fault, or by a pause shorter than dead_after");
  }
}

} // namespace

Report run(const Plan& plan, bool trace) {
  return World(plan, trace).run();
}

} // namespace pycomm::elastic::sim
