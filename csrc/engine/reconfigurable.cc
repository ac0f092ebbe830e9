// How the members of a group that changes meet, without a store of torch's:
//
//   1. Every member tells its own endpoint which instance it has called (Endpoint::call), so that others get an answer there.
//   2. The first member's instance is a store in memory. The others enter it through that member's endpoint; an endpoint whose member has not called
//      yet says so, and they ask again.
//   3. Group::join() runs on that store as on torch's: two rounds, control links, shared memory.
//   4. Every member says that it is ready, and returns when all are.
//
// The first member asks the endpoints of those who have not come after a while, so that a process that has ended is named soon and not when the
// time is over.
#include "engine/reconfigurable.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "base/native_thread.h"
#include "engine/meeting/endpoint_words.h"
#include "engine/meeting/meeting_store.h"
#include "transport/net/select_address.h"
#include "transport/net/socket_link.h"
#include "transport/random_bytes.h"
#include "transport/rendezvous/sealed_store.h"
#include "transport/rendezvous/store_round.h"

namespace pycomm {
namespace {

constexpr int kLookMs = kOneStepMs / 2; // for one member, as others wait behind it
constexpr int kLastReadyPauseMs = 20; // between two looks at who is ready

constexpr const char* kOneJob =
    "pass handles of groups that new_group() has made in one job, or of default groups alone, which may be of several jobs";
constexpr const char* kNewUuid = "pass a uuid that no earlier call for this group had: count up, for example";

/// The store of one meeting, with a seal on every value if there is a secret. Keeps what it consists of.
class Place final {
 public:
  Place(std::unique_ptr<MeetingStore> meeting, const std::shared_ptr<const Secret>& secret)
      : meeting_(std::move(meeting)), secret_(secret) {
    if (secret_ != nullptr) {
      sealed_ = std::make_unique<SealedStore>(*meeting_, *secret_);
    }
  }
  [[nodiscard]] Store& store() noexcept {
    return sealed_ != nullptr ? static_cast<Store&>(*sealed_) : *meeting_;
  }
  [[nodiscard]] MeetingStore& meeting() noexcept {
    return *meeting_;
  }

 private:
  const std::unique_ptr<MeetingStore> meeting_;
  const std::shared_ptr<const Secret> secret_;
  std::unique_ptr<SealedStore> sealed_;
};

/// A thread of the first member that looks for members that have not come, until it ends. If one cannot come, the meeting fails.
class Search final {
 public:
  Search(std::shared_ptr<Instance> instance, const Visitor& from)
      : instance_(std::move(instance)), from_(from), refusals_(static_cast<size_t>(instance_->size())) {
    reason_.code = ErrorCode::ShutDown;
    reason_.summary = "the search for members is over";
    if (instance_->size() > 1) {
      thread_ = startNativeThread("pycomm-search", [this] { run(); });
    }
  }
  ~Search() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    (void)end_.abort(std::move(reason_));
    changed_.notify_all();
    if (thread_.joinable()) {
      thread_.join();
    }
  }
  Search(const Search&) = delete;
  Search& operator=(const Search&) = delete;

 private:
  void run() noexcept {
    try {
      while (wait(kLastConnectPauseMs)) { // a member that calls at the same time has come by the first look
        for (int rank = 1; rank < instance_->size(); ++rank) {
          if (!instance_->hasEntered(rank) && !instance_->failure()) {
            look(rank);
          }
        }
      }
    } catch (const std::exception&) { // it is over, or there is no memory: then the time decides
    }
  }
  /// False if it is over.
  bool wait(int pause_ms) {
    std::unique_lock<std::mutex> lock(mutex_);
    return !changed_.wait_for(lock, std::chrono::milliseconds(pause_ms), [this] { return over_; });
  }
  void look(int rank) {
    const Deadline patience = Deadline::after(kLookMs);
    Dialed dialed = dial(instance_->member(rank), from_, patience, end_);
    int& refusals = refusals_[static_cast<size_t>(rank)];
    if (dialed.link == nullptr) {
      refusals = dialed.nobody_listens || dialed.another_listens ? refusals + 1 : 0;
      if (refusals >= kRefusals && !instance_->hasEntered(rank)) {
        instance_->fail(instance_->trouble(
            ErrorCode::PeerDead,
            rank,
            dialed.another_listens ? kAnotherListens : kNobodyListens,
            "leave its handle out and call reconfigure() again with a new uuid"));
      }
      return;
    }
    refusals = 0;
    const std::vector<std::string> words = requestFor(endpoint_request::kLook, *instance_, rank, 0);
    try {
      const auto answer = askEndpoint(*dialed.link, {words.begin(), words.end()}, patience, end_);
      if (auto refusal = refusalIn(answer, *instance_, rank, 0); refusal && !instance_->hasEntered(rank)) {
        instance_->fail(*refusal);
      }
    } catch (const Error&) { // no answer: the next look finds out more
    }
  }

  const std::shared_ptr<Instance> instance_;
  const Visitor from_;
  std::vector<int> refusals_; ///< by rank, in a row
  AbortToken end_;
  ErrorRecord reason_; ///< of its end; made before, as the destructor may have no memory
  std::mutex mutex_; ///< guards over_
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

[[noreturn]] void refuse(const std::string& what, const std::string& hint) {
  throw Error(ErrorCode::InvalidArgument, "reconfigure(): " + what + ".", hint);
}

// torch names the members of such a group by these numbers: src=, dst=.
JobRanks jobRanksIn(const std::vector<MemberHandle>& members) {
  std::map<int, const MemberHandle*> known;
  std::vector<int> numbers;
  for (const MemberHandle& member : members) {
    const auto [other, is_new] = known.emplace(member.job_rank, &member);
    if (!is_new && member.job_rank >= 0) {
      refuse(
          "two members have rank " + std::to_string(member.job_rank) + " of their jobs (" + other->second->who() +
              "; " + member.who() + ")",
          kOneJob);
    }
    numbers.push_back(member.job_rank);
  }
  const auto without = known.find(-1);
  if (without == known.end()) {
    return JobRanks(std::move(numbers));
  }
  if (known.size() > 1) {
    refuse("a handle is of a default group (" + without->second->who() + "), and another is not", kOneJob);
  }
  return {};
}

// Returns when all members are ready. Throws what a store does, and Error(RendezvousTimeout).
void waitForAll(
    Place& place,
    const Instance& instance,
    Deadline deadline,
    const AbortToken& abort,
    const Group& group) {
  for (int pause_ms = kFirstStorePauseMs;; pause_ms = std::min(2 * pause_ms, kLastReadyPauseMs)) {
    PYCOMM_FAULT_POINT("reconfigure.ready");
    const Instance::Ready ready = place.meeting().ready();
    if (ready.count == instance.size()) {
      return;
    }
    abort.throwIfAborted();
    if (const auto failure = group.failure()) {
      throw Error(*failure);
    }
    if (deadline.expired()) {
      throw Error(instance.trouble(
          ErrorCode::RendezvousTimeout,
          ready.first_missing,
          "came, but was not ready in time (timed out)",
          "look for the first error in that process's log, or give a longer timeout; then call reconfigure() again with a new uuid"));
    }
    (void)::poll(nullptr, 0, deadline.remainingMs(pause_ms));
  }
}

} // namespace

Reconfigurable::Reconfigurable(Engine& engine, Group::Config config, const SocketAddress& known)
    : engine_(engine),
      config_(std::move(config)),
      incarnation_(newProcessId()),
      endpoint_(openEndpoint(known)),
      self_([this] {
        MemberHandle self;
        self.incarnation = incarnation_;
        self.watch_name = engine_.localPeers().name();
        const RendezvousConfig& made = config_.rendezvous;
        self.job_rank = made.job.numbers().empty() ? -1 : made.job.of(made.rank);
        return endpoint_->addressed(std::move(self));
      }()) {
  endpoint_->add(incarnation_);
}

Reconfigurable::~Reconfigurable() {
  leave();
}

std::shared_ptr<Endpoint> Reconfigurable::openEndpoint(const SocketAddress& known) {
  const RendezvousConfig& meeting = config_.rendezvous;
  const Security& security = config_.security;
  const std::string key_id = security.secret == nullptr ? "" : security.secret->keyId();
  const bool unix_sockets = config_.transport != Transport::Tcp;
  const bool ports = security.secret != nullptr || security.policy != SecurityPolicy::Require;
  SocketAddress route;
  if (ports) {
    AddressPolicy policy;
    policy.spec = meeting.spec;
    policy.family = meeting.family;
    policy.store_host = meeting.store_host;
    const HostNetwork network = HostNetwork::ofThisHost();
    route = chooseRoute(policy, network).address;
    if (route.isLoopback() && (meeting.spec.empty() || meeting.spec.exclude)) {
      // The store is here, and its name leads no other host here: `known`, a group that was made before, or the default route may.
      policy.store_host.clear();
      const SocketAddress of_others = known.empty() ? engine_.addressOfGroups(meeting.family) : known;
      route = of_others.empty() ? chooseRoute(policy, network).address : of_others;
    }
  }
  const std::string key = meeting.spec.text() + " " + addressFamilyName(meeting.family) + " " + meeting.ports.text() +
      " " + key_id + (unix_sockets ? " unix" : "") + (ports ? " ports " + route.ip() : "");
  return engine_.endpoint(key, [&] {
    Endpoint::Config config;
    config.tls = security.open();
    config.id = config.tls == nullptr ? newProcessId() : config.tls->self();
    config.nonce = randomNumber();
    if (ports) {
      config.listeners.push_back(Listener::bind(route, meeting.ports));
      // Members of this host come by loopback, also when that interface is down. A user who has named interfaces gets no other.
      if (!route.isLoopback() && (meeting.spec.empty() || meeting.spec.matches("lo"))) {
        try {
          config.listeners.push_back(Listener::bind(SocketAddress::loopback(route.family()), meeting.ports));
        } catch (const Error& error) { // no such interface, or no port left: the other address serves this host, too
          log(LogLevel::Info, std::string("no endpoint on loopback: ") + error.what());
        }
      }
      for (Listener& listener : config.listeners) {
        listener.deferSilent();
      }
    }
    if (unix_sockets) {
      try {
        const std::string name = randomUnixName();
        config.listeners.push_back(Listener::bindUnix(name));
        config.unix_name = name;
      } catch (const Error& error) {
        log(LogLevel::Info,
            std::string("members of this host come by TCP, as there is no Unix socket: ") + error.what());
      }
    }
    if (config.listeners.empty()) {
      refuse(
          "PYCOMM_SECURITY=require, and there is neither a secret nor a Unix socket: no member could be let in",
          "run on one host: python -m pycomm secret --generate, and copy the file to the others");
    }
    return Endpoint::open(engine_.control(), std::move(config));
  });
}

std::vector<Endpoint::Offer> Reconfigurable::offer(const FixedPort& port, Deadline deadline) {
  if (self_.addresses.empty()) {
    throw Error(
        ErrorCode::InvalidArgument,
        "PYCOMM_SECURITY=require, and there is no secret: this process may open no port at which others find it",
        "run on one host: python -m pycomm secret --generate, and copy the file to the others");
  }
  const std::shared_ptr<const Secret>& secret = config_.security.secret;
  return endpoint_->offer(
      incarnation_,
      port.addressesHere(self_, deadline),
      secret == nullptr ? nullptr : std::make_shared<const TlsContext>(secret, FixedPort::kProcess));
}

Reconfigurable::Plan Reconfigurable::plan(
    int64_t uuid,
    const std::vector<std::string>& handles,
    std::optional<JobRanks> called) {
  if (handles.empty()) {
    refuse("the list of handles is empty", "pass one handle for each member, this one's among them");
  }
  if (handles.size() > static_cast<size_t>(kMaxRanks)) {
    refuse("there are " + std::to_string(handles.size()) + " handles", "at most 65536");
  }
  std::vector<MemberHandle> members;
  members.reserve(handles.size());
  Plan plan;
  std::set<ProcessId> seen;
  for (const std::string& text : handles) {
    MemberHandle member = MemberHandle::parse(text);
    const auto rank = static_cast<int>(members.size());
    if (!seen.insert(member.incarnation).second) {
      refuse(
          "the handle at " + std::to_string(rank) + " (" + member.who() + ") is in the list twice",
          "pass one handle for each member");
    }
    if (member.key_id != self_.key_id) {
      const auto called = [](const std::string& key_id) {
        return key_id.empty() ? std::string("no secret") : "the secret of key id " + key_id;
      };
      throw Error(
          ErrorCode::ConfigMismatch,
          "reconfigure(): rank " + std::to_string(rank) + " of the new group (" + member.who() + ") has " +
              called(member.key_id) + ", and this process has " + called(self_.key_id),
          "give all hosts the same secret file, or none");
    }
    plan.rank = member.incarnation == incarnation_ ? rank : plan.rank;
    members.push_back(std::move(member));
  }
  if (plan.rank < 0) {
    refuse(
        "this process's own handle is not among the " + std::to_string(handles.size()),
        "only members of the new group call reconfigure(); a handle is of one group, and not of a later one of that process");
  }
  if (!called) {
    called = jobRanksIn(members);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!used_.insert(uuid).second) {
    refuse("uuid " + std::to_string(uuid) + " was already used by this group", kNewUuid);
  }
  plan.instance = std::make_shared<Instance>(uuid, std::move(members), *std::move(called));
  return plan;
}

// A rendezvous over torch's store speaks of that.
ErrorRecord Reconfigurable::explained(ErrorRecord record, const Instance& instance) const {
  if (record.code == ErrorCode::Aborted) { // by abort(), or by a signal: not a reason to start the job again
    record.hint = "let the members that go on call reconfigure() again with a new uuid";
  }
  const bool timed_out = record.code == ErrorCode::RendezvousTimeout;
  if (timed_out && record.summary.rfind("reconfigure(", 0) != 0) {
    record.hint =
        "did every member call reconfigure() with this uuid and this list? Leave out the handles of those that have ended, and call it "
        "again with a new uuid; a longer timeout helps slow members";
    const int peer = instance.job().inGroup(record.peer);
    if (peer >= 0 && peer < instance.size()) {
      record.peer_host = record.peer_host.empty() ? instance.member(peer).host.hostname : record.peer_host;
      record.summary +=
          "; " + instance.who(peer) + " has not called reconfigure(uuid=" + std::to_string(instance.uuid()) + ")";
    }
  }
  return record;
}

Reconfigurable::Met Reconfigurable::meet(const Plan& plan, Deadline deadline, JoinAbort& abort) {
  const TimePoint began = Clock::now();
  const std::shared_ptr<Instance>& instance = plan.instance;
  Group::Config config = config_;
  RendezvousConfig& meeting = config.rendezvous;
  meeting.rank = plan.rank;
  meeting.size = instance->size();
  meeting.job = instance->job();
  meeting.epoch = instance->uuid();
  meeting.deadline = deadline;
  meeting.serves_store = false;
  meeting.takeover = Takeover::Never;
  std::vector<MemberHandle> members;
  for (int rank = 0; rank < instance->size(); ++rank) {
    members.push_back(instance->member(rank));
  }
  meeting.store_host = routeHint(members, static_cast<size_t>(plan.rank));
  const Visitor visitor = this->visitor();
  Met met;
  met.instance = instance;
  std::shared_ptr<Place> place;
  std::unique_ptr<Search> search;
  try {
    PYCOMM_FAULT_POINT("reconfigure.call");
    endpoint_->call(incarnation_, instance);
    for (int rank = 0; rank < instance->size(); ++rank) {
      if (rank != plan.rank && waysTo(instance->member(rank), self_.host, visitor.unix_sockets).empty()) {
        throw Error(instance->trouble(
            ErrorCode::ConnectFailed,
            rank,
            "cannot be reached from " + self_.who() + ": its handle has no address that leads there",
            "set PYCOMM_SOCKET_IFNAME in that process to the interface that the other hosts reach; under PYCOMM_SECURITY=require, give "
            "all hosts a secret"));
      }
    }
    std::unique_ptr<MeetingStore> store;
    if (plan.rank == 0) {
      (void)instance->enter(0);
      search = std::make_unique<Search>(instance, visitor);
      store = std::make_unique<OwnMeeting>(instance);
    } else {
      store =
          std::make_unique<RemoteMeeting>(instance, plan.rank, visitor, deadline, config.dead_after_ms, abort.token());
    }
    place = std::make_shared<Place>(std::move(store), config.security.secret);
    met.group = Group::join(engine_, place->store(), config, abort);
    waitForAll(*place, *instance, deadline, abort.token(), *met.group);
    place->meeting().finish();
  } catch (const std::exception& exception) {
    ErrorRecord record = explained(recordOf(exception, "the group could not be reconfigured"), *instance);
    record.elapsed_ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count();
    record.group = record.group.empty() ? meeting.group_name : record.group;
    if (record.peer < 0 && record.rank >= 0 && record.rank != plan.jobRank()) { // another one has given up
      record.peer = record.rank;
      record.peer_host = record.host;
    }
    record.rank = plan.jobRank();
    record.host = localHostName();
    record.epoch = instance->uuid();
    if (place == nullptr) {
      instance->fail(record);
    } else if (!place->meeting().fail(record) && met.group != nullptr) {
      place->meeting().finish(); // all the others return their group
      met.store = {place, &place->store()};
      return met;
    }
    if (met.group != nullptr) {
      met.group->abort(record);
      met.group->close();
      met.group.reset();
    }
    if (plan.rank == 0) { // it may end its process next
      for (const Deadline end = Deadline::after(kSayWhyMs); !instance->allTold() && !end.expired();) {
        (void)::poll(nullptr, 0, end.remainingMs(kShortPauseMs));
      }
    }
    if (place != nullptr) {
      place->meeting().finish();
    }
    throw Error(record);
  }
  met.store = {place, &place->store()};
  return met;
}

} // namespace pycomm
