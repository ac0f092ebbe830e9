// How a group comes to be: it meets the other ranks in the store, connects its control links, then shares memory with the ranks of its host.
#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <utility>

#include "base/fault_point.h"
#include "base/log.h"
#include "base/process_limits.h"
#include "base/slow_wait.h"
#include "engine/group.h"
#include "engine/links/connector.h"
#include "engine/report/failure_text.h"
#include "transport/rendezvous/notices.h"

namespace pycomm {
namespace {

// All ranks read it: "this process" alone would be each reader's own.
std::string cannotJoin(const ErrorRecord& record) {
  return "Rank " + std::to_string(record.rank) + " on " + record.host + " cannot join: " + record.summary;
}

ErrorRecord withOwnPlace(ErrorRecord record, const RendezvousConfig& meeting, ErrorPhase phase, TimePoint began) {
  if (record.code == ErrorCode::TooManyFiles && record.peer < 0) { // not yet told
    GroupIdentity self;
    self.rank = meeting.rank;
    self.size = meeting.size;
    self.job = meeting.job;
    self.name = meeting.group_name;
    record = withNeed(std::move(record), self);
    record.summary = cannotJoin(record);
  } else if (record.rank >= 0 && record.rank != meeting.job.of(meeting.rank)) { // told by another rank
    if (record.peer < 0) { // which has the trouble itself
      record.summary = cannotJoin(record);
    }
    // Else `peer` is the same rank for all who read it.
    const bool of_two = record.code == ErrorCode::ConfigMismatch || record.code == ErrorCode::VersionMismatch;
    if (record.peer < 0 || (of_two && record.peer == meeting.job.of(meeting.rank))) {
      record.peer = record.rank;
      record.peer_host = record.host;
    }
  }
  record.rank = meeting.job.of(meeting.rank);
  record.host = localHostName();
  record.group = meeting.group_name;
  record.group_ranks = meeting.job.list();
  record.epoch = meeting.epoch;
  record.phase = record.phase.known() ? record.phase : phase;
  record.elapsed_ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count();
  return record;
}

/// Makes this rank's own record of what keeps a group from forming. This rank or another one may have noticed it.
/// Without memory for the texts, only the rank is set.
ErrorRecord asSeenHere(
    ErrorRecord record,
    const RendezvousConfig& meeting,
    ErrorPhase phase,
    TimePoint began) noexcept {
  try {
    return withOwnPlace(record, meeting, phase, began);
  } catch (const std::bad_alloc&) {
    record.rank = meeting.job.of(meeting.rank);
    return record;
  }
}

/// What keeps this rank from the rendezvous must reach the others: they would wait for it until their timeout.
std::shared_ptr<const TlsContext> openOrPost(const Group::Config& config, Store& store) {
  try {
    return config.security.open(store);
  } catch (const Error& error) {
    const ErrorRecord& record = error.record();
    const std::string reason = record.summary + (record.cause.empty() ? "" : " (" + record.cause + ")") +
        (record.hint.empty() ? "" : ". Try there: " + record.hint);
    postNotice(
        store, config.rendezvous.group_name, config.rendezvous.life, {config.rendezvous.rank, localHostName(), reason});
    throw;
  }
}

std::vector<Listener> takeListeners(Rendezvous&& met) {
  std::vector<Listener> listeners;
  for (Listener* listener : {&met.unix_listener, &met.listener}) {
    if (*listener) {
      listeners.push_back(std::move(*listener));
    }
  }
  return listeners;
}

} // namespace

std::shared_ptr<Group> Group::join(Engine& engine, Store& store, const Config& config, JoinAbort& abort) {
  const TimePoint began = Clock::now();
  RendezvousConfig meeting = config.rendezvous;
  meeting.unix_sockets = config.transport != Transport::Tcp;
  meeting.watch_name = meeting.size > 1 ? engine.localPeers().name() : "";
  FlightLog::Subject subject;
  subject.group = meeting.group_name;
  subject.rank = meeting.rank;
  subject.size = meeting.size;
  subject.job = meeting.job;
  const auto title = std::make_shared<GroupTitle>();
  subject.title = title;
  subject.slots = config.flight_slots;
  subject.dump_prefix = config.flight_dump_prefix;
  const std::shared_ptr<FlightLog> log = engine.recorder().open(std::move(subject));
  std::shared_ptr<Group> group;
  RankClaim claim; // from meet() on; the group, once there is one, gives it back
  try {
    std::shared_ptr<const TlsContext> tls = openOrPost(config, store);
    meeting.process_id = tls == nullptr ? ProcessId() : tls->self();
    Rendezvous met = meet(store, meeting, abort.token());
    claim = met.claim;
    Roster roster(meeting, met);
    config.security.checkHosts(roster);
    config.security.finish(roster, met.transcript, std::move(tls));
    roster.identity.title = title;
    group.reset(new Group(engine, store, log, std::move(roster)));
    abort.made(group);
    log->met(group->identity().hosts, met.run);
    group->connect(config, takeListeners(std::move(met)), abort.token());
    MemorySharing sharing(engine, store, group->roster_, group->planes_, group->failure_.token());
    group->why_not_shared_ = sharing.share(config.transport, meeting.deadline);
    PYCOMM_FAULT_POINT("group.joined");
    engine.add(group);
    forgetMeeting(store, claim, meeting.size);
  } catch (const std::exception& exception) {
    ErrorRecord record = recordOf(exception, "the group could not be made");
    if (dynamic_cast<const std::bad_alloc*>(&exception) != nullptr) {
      record = noMemoryLeft("free memory on this host, or start fewer ranks on it");
    }
    const ErrorPhase phase = group == nullptr ? ErrorPhase::Rendezvous : ErrorPhase::Connect;
    record = asSeenHere(std::move(record), meeting, phase, began);
    if (group == nullptr && claim.generation > 0) {
      (void)tellFailure(store, claim, record); // this rank has met the others, and they wait for it
      acknowledgeFailure(store, claim, meeting, record);
      leave(store, claim);
    }
    if (group != nullptr) {
      // Ranks without a link to this one would otherwise wait for it until their deadline. Once that has passed, it has for all, and
      // each can say best what it missed.
      if (record.code != ErrorCode::ConnectFailed || !meeting.deadline.expired()) {
        // The first of all ranks counts, as its rank wrote it.
        record = asSeenHere(tellFailure(store, group->roster_.claim, record), meeting, record.phase, began);
        if (const int peer = meeting.job.inGroup(record.peer);
            record.peer >= 0 && (peer < 0 || peer >= meeting.size)) { // another program writes into the store
          record.peer = -1;
          record.peer_host.clear();
        }
        group->abort(record); // for those that have a link, and may have begun already
        acknowledgeFailure(store, group->roster_.claim, meeting, record);
      }
    }
    engine.recorder().failed(log, record);
    if (claim.generation > 0) {
      forgetMeeting(store, claim, meeting.size);
    }
    if (group != nullptr) {
      group->close();
    }
    log->reached(GroupPhase::Closed);
    throw Error(record);
  }
  log->reached(GroupPhase::Ready);
  return group;
}

Group::Group(Engine& engine, Store& store, std::shared_ptr<FlightLog> log, Roster roster)
    : engine_(engine),
      store_(store),
      log_(std::move(log)),
      roster_(std::move(roster)),
      issuer_(roster_, log_),
      failure_(roster_.identity),
      planes_(roster_.identity, engine.dataLoop(), engine.control(), planeEvents()) {}

void Group::connect(const Config& config, std::vector<Listener> listeners, const AbortToken& abort) {
  const GroupIdentity& identity = roster_.identity;
  if (roster_.localRanks().size() > usableCores()) {
    crowds_ = true;
    engine_.dataLoop().addCrowded(1);
  }
  Membership::Config membership;
  membership.rank = identity.rank;
  membership.job = identity.job;
  membership.hosts = identity.hosts;
  membership.neighbours = controlNeighbours(identity.rank, identity.size, roster_.localRanks());
  membership.group = identity.name;
  membership.dead_after_ms = config.dead_after_ms;
  membership.heartbeat_every_ms = config.dead_after_ms / Membership::kHeartbeatsWithin;

  engine_.dataLoop().run([&] { planes_.openData(); });
  engine_.control().run([&] {
    planes_.openControl(std::move(listeners), membership);
    watchLocalPeers(membership.neighbours);
  });
  abort.throwIfAborted(); // what comes later fails the group, and with it all waits below

  // Of each pair the lower rank connects.
  const Deadline deadline = config.rendezvous.deadline;
  const Connector connector(identity);
  for (const int peer : membership.neighbours) {
    if (peer < identity.rank) {
      continue;
    }
    // There may be nobody to connect to any more.
    std::unique_ptr<Link> link =
        connector.openControl(peer, deadline, failure_.token(), [&] { throwIfFailed(store_, roster_.claim); });
    engine_.control().run([&] { planes_.control()->adopt(peer, std::move(link)); });
  }
  waitForNeighbours(deadline);
}

// On the control loop. Looked away from in close(), on this loop, before the control plane goes.
void Group::watchLocalPeers(const std::vector<int>& neighbours) {
  const std::vector<int32_t>& local_peers = roster_.localRanks();
  watches_.reserve(neighbours.size()); // first: close() must know each
  for (const int local_peer : neighbours) {
    if (std::binary_search(local_peers.begin(), local_peers.end(), local_peer)) {
      watches_.push_back(engine_.localPeers().watch(
          roster_.watch_names[static_cast<size_t>(local_peer)],
          Loop::owned(planes_, [this, local_peer] { planes_.died(local_peer); })));
    }
  }
}

void Group::waitForNeighbours(Deadline deadline) {
  const GroupIdentity& identity = roster_.identity;
  std::vector<int> missing;
  SlowWait slow(Clock::now());
  for (;;) {
    const Deadline look = Deadline::at(std::min(deadline.instant(), Deadline::after(kLookAgainMs).instant()));
    missing = planes_.control()->waitForNeighbours(look, failure_.token());
    failure_.token().throwIfAborted();
    if (missing.empty() || deadline.expired()) {
      break;
    }
    throwIfFailed(store_, roster_.claim);
    if (const auto waited_s = slow.due(Clock::now())) {
      pycomm::log(LogLevel::Warn, stillUnconnected(missing, *waited_s, identity));
    }
  }
  if (!missing.empty()) {
    std::optional<ErrorRecord> trouble;
    engine_.control().run([&] { trouble = planes_.control()->trouble(); });
    if (trouble) {
      throw Error(cannotAccept(*trouble, identity));
    }
    throw Error(neverConnected(missing.front(), identity));
  }
}

} // namespace pycomm
