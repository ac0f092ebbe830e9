// How a group comes to be: it meets the other ranks in the store, then connects its control links.
#include <algorithm>
#include <chrono>
#include <utility>

#include "base/fault_point.h"
#include "base/log.h"
#include "base/usable_cores.h"
#include "engine/group.h"
#include "engine/links/connector.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

// How often a rank that waits for connections looks into the store for why they do not come.
constexpr int kJoinSliceMs = 500;

constexpr int kMaxStreams = 16; // over each interface

/// A number a rank, equal where hosts are: the lowest rank there.
std::vector<int32_t> hostNumbers(const std::vector<Member>& members) {
  std::vector<int32_t> numbers;
  for (const Member& member : members) {
    const auto first = std::find_if(
        members.begin(), members.end(), [&](const Member& other) { return other.identity == member.identity; });
    numbers.push_back(static_cast<int32_t>(first - members.begin()));
  }
  return numbers;
}

// All ranks read it: "this process" alone would be each reader's own.
std::string cannotJoin(const ErrorRecord& record) {
  return "Rank " + std::to_string(record.rank) + " on " + record.host + " cannot join: " + record.summary;
}

/// The record of this rank about what keeps a group from forming, whoever noticed it.
ErrorRecord asSeenHere(ErrorRecord record, const RendezvousConfig& meeting, const std::string& phase, TimePoint began) {
  if (record.code == ErrorCode::TooManyFiles && record.peer < 0) { // not yet told
    GroupIdentity self;
    self.rank = meeting.rank;
    self.size = meeting.size;
    self.name = meeting.group_name;
    record = withNeed(std::move(record), self);
    record.summary = cannotJoin(record);
  } else if (
      record.rank >= 0 && record.rank != meeting.rank && record.peer < 0) { // told by the rank that has the trouble
    record.peer = record.rank;
    record.peer_host = record.host;
    record.summary = cannotJoin(record);
  }
  record.rank = meeting.rank;
  record.host = localHostName();
  record.group = meeting.group_name;
  record.epoch = 0;
  record.phase = !record.phase.empty() ? record.phase : phase;
  record.elapsed_ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count();
  return record;
}

} // namespace

std::shared_ptr<Group> Group::join(Engine& engine, Store& store, const Config& config) {
  AbortToken none;
  const TimePoint began = Clock::now();
  RendezvousConfig meeting = config.rendezvous;
  meeting.watch_name = meeting.size > 1 ? engine.hostMates().name() : "";
  FlightLog::Subject subject;
  subject.group = meeting.group_name;
  subject.rank = meeting.rank;
  subject.size = meeting.size;
  subject.world_rank = config.world_rank >= 0 ? config.world_rank : meeting.rank;
  subject.global_ranks = config.global_ranks;
  subject.slots = config.flight_slots;
  subject.dump_prefix = config.flight_dump_prefix;
  const std::shared_ptr<FlightLog> log = engine.recorder().open(std::move(subject));
  std::shared_ptr<Group> group;
  try {
    if (config.streams < 1 || config.streams > kMaxStreams) {
      throw Error(
          ErrorCode::InvalidArgument,
          "a link cannot be made of " + std::to_string(config.streams) + " connections",
          "streams=1 to " + std::to_string(kMaxStreams));
    }
    group.reset(new Group(engine, store, log, config, meet(store, meeting, none)));
    group->connect(config);
    group->shareMemory(config);
    PYCOMM_FAULT_POINT("group.joined");
    engine.add(group);
  } catch (const Error& error) {
    ErrorRecord record = asSeenHere(error.record(), meeting, group == nullptr ? "rendezvous" : "connect", began);
    if (group != nullptr) {
      // Ranks without a link to this one would otherwise wait for it until their deadline. Where that is what has passed, it has for
      // all, and each can say best what it missed.
      if (record.code != ErrorCode::ConnectFailed) {
        // The first of all ranks counts, as its rank wrote it.
        record = asSeenHere(tellFailure(store, group->claim_, record), meeting, record.phase, began);
        if (record.peer >= meeting.size) { // another program writes into the store
          record.peer = -1;
          record.peer_host.clear();
        }
        group->abort(record); // for those that have a link, and may have begun already
      }
    }
    engine.recorder().failed(log, record);
    if (group != nullptr) {
      group->close();
    }
    log->reached(GroupPhase::Closed);
    throw Error(record);
  }
  log->reached(GroupPhase::Ready);
  return group;
}

Group::Group(
    Engine& engine,
    Store& store,
    std::shared_ptr<FlightLog> log,
    const Config& config,
    Rendezvous&& rendezvous)
    : engine_(engine),
      store_(store),
      log_(std::move(log)),
      claim_(rendezvous.claim),
      address_reason_(rendezvous.address_reason),
      interface_name_(rendezvous.interface_name),
      planes_(identity_, engine.lane(), engine.control(), planeEvents()) {
  identity_.rank = config.rendezvous.rank;
  identity_.size = config.rendezvous.size;
  identity_.name = config.rendezvous.group_name;
  identity_.hash = rendezvous.group_hash;
  identity_.nonce = rendezvous.nonce;
  identity_.local_address = rendezvous.local_address;
  identity_.interface_name = rendezvous.interface_name;
  identity_.streams = config.streams * static_cast<int>(rendezvous.further.size() + 1);
  listeners_.push_back(std::move(rendezvous.listener));
  for (Rendezvous::Further& further : rendezvous.further) {
    GroupIdentity::Path path;
    path.local_address = further.listener.address();
    path.interface_name = further.interface_name;
    for (const Member& member : rendezvous.members) {
      path.addresses.push_back(member.further[identity_.further.size()]);
    }
    identity_.further.push_back(std::move(path));
    listeners_.push_back(std::move(further.listener));
  }
  for (const Member& member : rendezvous.members) {
    identity_.hosts.push_back(member.host);
    identity_.addresses.push_back(member.address);
    watch_names_.push_back(member.watch_name);
    remarks_.push_back(member.remark);
  }
  topology_ = std::make_unique<const TopologyView>(hostNumbers(rendezvous.members));
  log_->met(identity_.hosts, rendezvous.run);
}

void Group::connect(const Config& config) {
  if (hostMates().size() > usableCores()) {
    crowds_ = true;
    engine_.lane().addCrowded(1);
  }
  Membership::Config membership;
  membership.rank = identity_.rank;
  membership.hosts = identity_.hosts;
  membership.neighbours = controlNeighbours(identity_.rank, identity_.size, hostMates());
  membership.group = identity_.name;
  membership.heartbeat_every_ms = config.heartbeat_every_ms;
  membership.dead_after_ms = config.dead_after_ms;

  engine_.lane().run([&] { planes_.openData(); });
  engine_.control().run([&] {
    planes_.openControl(std::move(listeners_), membership);
    for (const int mate : membership.neighbours) {
      if (std::binary_search(hostMates().begin(), hostMates().end(), mate)) {
        // Looked away from in close(), on this loop, before the control plane goes.
        watches_.push_back(engine_.hostMates().watch(
            watch_names_[static_cast<size_t>(mate)],
            Loop::owned(planes_, [this, mate] { planes_.control()->died(mate); })));
      }
    }
  });

  // Of each pair the lower rank connects.
  const Deadline deadline = config.rendezvous.deadline;
  const Connector connector(identity_);
  for (const int peer : membership.neighbours) {
    if (peer < identity_.rank) {
      continue;
    }
    // There may be nobody to connect to any more.
    std::unique_ptr<Link> link = connector.openControl(peer, deadline, abort_, [&] { throwIfFailed(store_, claim_); });
    engine_.control().run([&] { planes_.control()->adopt(peer, std::move(link)); });
  }
  std::vector<int> missing;
  for (;;) {
    const Deadline look = Deadline::at(std::min(deadline.instant(), Deadline::after(kJoinSliceMs).instant()));
    missing = planes_.control()->waitForNeighbours(look, abort_);
    abort_.throwIfAborted();
    if (missing.empty() || deadline.expired()) {
      break;
    }
    throwIfFailed(store_, claim_);
  }
  if (!missing.empty()) {
    std::optional<ErrorRecord> trouble;
    engine_.control().run([&] { trouble = planes_.control()->trouble(); });
    if (trouble) {
      throw Error(cannotAccept(*trouble, identity_));
    }
    ErrorRecord record;
    record.code = ErrorCode::ConnectFailed;
    record.rank = identity_.rank;
    record.host = identity_.host(identity_.rank);
    record.peer = missing.front();
    record.peer_host = identity_.host(missing.front());
    record.group = identity_.name;
    record.phase = "connect";
    record.summary = "Rank " + std::to_string(missing.front()) + " on " + record.peer_host +
        " met us in the store but never connected to " + identity_.route(identity_.rank).remote.text() + ".";
    record.hint =
        "a firewall may block that port: open a range and set PYCOMM_PORT_RANGE to it, or choose another interface "
        "with PYCOMM_SOCKET_IFNAME";
    throw Error(record);
  }
}

} // namespace pycomm
