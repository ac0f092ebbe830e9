#include "transport/rendezvous/rendezvous.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <iterator>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/printable.h"
#include "transport/frame_header.h"
#include "transport/net/name_lookup.h"
#include "transport/net/select_address.h"
#include "transport/random_bytes.h"
#include "transport/rendezvous/notices.h"
#include "transport/rendezvous/rank_record.h"
#include "transport/rendezvous/store_round.h"
#include "transport/rendezvous/unix_sockets.h"
#include "transport/secure/crypto.h"

// Two rounds, because an address to listen on can only be chosen after all ranks are known:
//
//   1. every rank writes  member/<rank>  = who and where I am;  rank 0 reads them all and writes  member/all
//   2. every rank binds and writes  address/<rank>;             rank 0 reads them all and writes  address/all
//
// A rank that reaches all others by Unix sockets, which it tries in between, binds no port and writes "unix". If others did bind, it binds
// too, and
//
//   3. every rank writes  port/<rank>;                          rank 0 reads them all and writes  port/all
//
// So N ranks exchange their records in O(N) store calls instead of N^2. Waiting costs more: each rank polls the list
// and `error`, with pauses of 1 to 100 ms. Ranks other than 0 also poll a few single records each time, so that they
// find a mismatch with an existing record without waiting for a late rank (store_round.h). An error that ends the rendezvous on one
// rank is written to `error` and ends it on all.
//
// In a sealed store (SealedStore) a record of another job, which the same secret has sealed, might be put in place of one. Each member
// record therefore has a fresh random number, every rank looks for its own record in the list, and the keys of the second round and of all
// later ones contain the hash of the list. So nothing sealed before this list was complete counts after it.

namespace pycomm {
namespace {

constexpr size_t kMaxTextNbytes = 512; // of exchangeTexts()

// FNV-1a, folded to 32 bits.
uint32_t hashOf(const std::string& name, uint64_t nonce) {
  uint64_t hash = 0xcbf29ce484222325U;
  const auto add = [&](unsigned char byte) { hash = (hash ^ byte) * 0x100000001b3U; };
  for (const char c : name) {
    add(static_cast<unsigned char>(c));
  }
  for (int shift = 0; shift < 64; shift += 8) {
    add(static_cast<unsigned char>(nonce >> shift));
  }
  return static_cast<uint32_t>(hash ^ (hash >> 32));
}

void checkConfig(const RendezvousConfig& config) {
  if (config.size < 1 || config.size > kMaxRanks || config.rank < 0 || config.rank >= config.size) {
    throw Error(
        ErrorCode::InvalidArgument,
        "rank " + std::to_string(config.rank) + " does not exist in a world of size " + std::to_string(config.size),
        "RANK counts from 0 to WORLD_SIZE - 1");
  }
}

RankRecord ownRecord(
    const RendezvousConfig& config,
    const SocketAddress& route,
    const std::string& unix_socket,
    bool sealed) {
  RankRecord record;
  record.version = FrameHeader::kVersion;
  record.rank = config.rank;
  record.job_rank = config.job.of(config.rank);
  record.size = config.size;
  record.host = localHostName();
  record.identity = HostIdentity::ofThisProcess();
  record.process = ProcessIdentity::ofThisProcess();
  record.route = route;
  record.config_digest = config.config_digest;
  record.config_text = config.config_text;
  record.nonce = config.rank == 0 || sealed || config.takeover == Takeover::FromEndedRun ? randomNumber() : 0;
  record.run = config.rank == 0 ? randomNumber() : 0;
  record.process_id = sealed ? config.process_id : ProcessId();
  record.watch_name = config.watch_name;
  record.unix_socket = unix_socket;
  record.remark = config.remark;
  return record;
}

struct Introduced {
  std::vector<RankRecord> records;
  std::string transcript; ///< Rendezvous::transcript
  uint64_t nonce = 0; ///< Rendezvous::nonce
};

std::string bindingOf(const std::string& transcript) {
  return transcript.empty() ? "" : transcript + "/";
}

// The hash of all member records.
Digest digestOf(const std::vector<std::string>& texts) {
  return sha256(joinTexts(texts));
}

// Binds the round, if the store is sealed.
Introduced introduce(StoreRound& round, const RankRecord& mine) {
  const bool sealed = round.store.sealed();
  const std::string text_of_mine = mine.wireText();
  const auto digestText = [](const std::string& text) { return hexOf(viewOf(sha256(text))); };
  round.self = sealed ? digestText(text_of_mine) : "";
  const auto judge = [&](int rank, const std::string& text) {
    checkCompatible(mine, RankRecord::fromWireText(text, rank, round.job));
  };
  const auto name = [&](int rank, const std::string& text) {
    return text.empty() ? round.job.text(rank) : RankRecord::fromWireText(text, rank, round.job).who();
  };
  std::vector<std::string> texts;
  try {
    texts = round.gather("member", text_of_mine, judge, name);
  } catch (const NotInList& error) {
    if (sealed) { // others are bound to that list, and look for errors there
      round.binding = bindingOf(hexOf(viewOf(digestOf(error.list()))));
    }
    throw;
  }
  Introduced introduced;
  for (const std::string& text : texts) {
    introduced.records.push_back(
        RankRecord::fromWireText(text, static_cast<int>(introduced.records.size()), round.job));
  }
  introduced.nonce = introduced.records.front().nonce;
  if (sealed) {
    const Digest digest = digestOf(texts);
    introduced.transcript = hexOf(viewOf(digest));
    round.binding = bindingOf(introduced.transcript);
    std::transform(texts.begin(), texts.end(), std::back_inserter(round.members), digestText);
    std::memcpy(&introduced.nonce, digest.data(), sizeof introduced.nonce);
  }
  return introduced;
}

constexpr const char* kNoPort = "unix"; // instead of the address of a rank that has bound no port

bool isWithoutPort(const std::string& text) {
  return text == kNoPort;
}

[[noreturn]] void refuseAddress(const std::string& who) {
  throw Error(
      ErrorCode::ProtocolViolation,
      "the store holds an address of " + who + " that no pycomm wrote",
      "is the store shared with another program?");
}

// Empty for a rank without a port.
SocketAddress addressIn(const std::string& text, const std::string& who) {
  if (isWithoutPort(text)) {
    return {};
  }
  const auto address = SocketAddress::fromWireText(text);
  if (!address || address->port() == 0 || address->isUnspecified()) {
    refuseAddress(who);
  }
  return *address;
}

/// The second round of a rendezvous, and the third if there is one: exchanges where the ranks listen. Returns the address of each rank;
/// all are empty if all ranks reach each other by Unix sockets. `bind` binds the port of this rank and returns its address as text; it is called
/// once if this rank `needs_port` or any other does. Throws what gather() and `bind` throw, and Error(ProtocolViolation) for what no pycomm
/// wrote.
std::vector<SocketAddress> exchangeAddresses(
    const StoreRound& round,
    const std::vector<RankRecord>& records,
    bool needs_port,
    const std::function<std::string()>& bind) {
  const auto name = [&](int rank, const std::string&) { return records[static_cast<size_t>(rank)].who(); };
  const auto readAddress = [&](int rank, const std::string& text) { return addressIn(text, round.job.text(rank)); };
  std::string mine = needs_port ? bind() : kNoPort;
  std::vector<std::string> texts = round.gather("address", mine, readAddress, name);
  const auto without = std::count_if(texts.begin(), texts.end(), isWithoutPort);
  const bool some = without > 0 && static_cast<size_t>(without) < texts.size();
  if (some) {
    mine = needs_port ? mine : bind();
    texts = round.gather("port", mine, readAddress, name);
  }
  std::vector<SocketAddress> addresses;
  for (const std::string& text : texts) {
    const auto rank = static_cast<int>(addresses.size());
    if (isWithoutPort(text) && (some || needs_port)) {
      refuseAddress(round.job.text(rank));
    }
    addresses.push_back(readAddress(rank, text));
  }
  return addresses;
}

// Checks now that all ranks can connect to all, instead of failing later in connections. Every rank checks the whole
// list, so that all come to the same result.
void checkReachable(const std::vector<Member>& members, const JobRanks& job) {
  const auto where = [&](const Member& member) {
    return job.text(member.rank) + " (host " + member.host + ") listens on " + member.address.text();
  };
  const Member& first = members.front();
  const bool one_host = std::all_of(
      members.begin(), members.end(), [&](const Member& member) { return member.identity == first.identity; });
  for (const Member& member : members) {
    if (member.address.family() != first.address.family()) {
      throw Error(
          ErrorCode::ConfigMismatch,
          where(first) + " and " + where(member) + ": one is IPv4, the other IPv6",
          "choose one address family, or interfaces that have the same one on all hosts");
    }
    if (!one_host && member.address.isLoopback()) {
      throw Error(
          ErrorCode::NoInterface,
          where(member) + ", which other hosts cannot reach",
          "set PYCOMM_SOCKET_IFNAME there to an interface that the other hosts reach");
    }
  }
}

std::vector<Member> membersOf(
    const std::vector<RankRecord>& records,
    const std::vector<SocketAddress>& addresses,
    const std::vector<SocketAddress>& reached,
    const JobRanks& job) {
  std::vector<Member> members;
  for (const RankRecord& record : records) {
    Member member;
    member.rank = record.rank;
    member.host = record.host;
    member.identity = record.identity;
    member.pid = record.process.pid;
    member.watch_name = record.watch_name;
    member.remark = record.remark;
    member.process_id = record.process_id;
    member.unix_socket = reached[members.size()];
    member.address = addresses[members.size()];
    members.push_back(std::move(member));
  }
  if (!members.front().address.empty()) {
    checkReachable(members, job);
  }
  return members;
}

Rendezvous meetAs(StoreRound& round, const RendezvousConfig& config) {
  AddressPolicy policy;
  policy.spec = config.spec;
  policy.family = config.family;
  policy.store_host = config.store_host;
  HostNetwork network = HostNetwork::ofThisHost();
  network.lookUp = [&](const std::string& host) { return nameLookups().find(host, config.deadline, round.abort); };
  UnixSockets sockets(config.unix_sockets && config.size > 1);
  const RankRecord mine = ownRecord(config, chooseRoute(policy, network).address, sockets.name(), round.store.sealed());
  const auto [records, transcript, nonce] = introduce(round, mine);

  std::vector<RankRoute> routes;
  for (const RankRecord& record : records) {
    routes.push_back({record.identity, record.route, record.job_rank});
  }
  const AddressChoice choice = chooseAddress(policy, network, routes, static_cast<size_t>(config.rank));
  Rendezvous met;
  met.nonce = nonce;
  met.run = records.front().run;
  met.transcript = transcript;
  met.group_hash = hashOf(config.group_name, met.nonce);
  met.interface_name = choice.interface_name;
  met.address_reason = choice.why;
  met.local_address = choice.address;
  sockets.reach(records, config.rank);
  const std::vector<SocketAddress> addresses =
      exchangeAddresses(round, records, config.size > 1 && !sockets.reachesAll(), [&] {
        met.listener = Listener::bind(choice.address, config.ports);
        met.listener.deferSilent();
        met.local_address = met.listener.address();
        return met.local_address.wireText();
      });
  met.members = membersOf(records, addresses, sockets.reached(), round.job);
  met.unix_listener = sockets.take();
  return met;
}

// The keys of one generation of a group.
std::string keysOf(const RankClaim& claim) {
  return claim.prefix + std::to_string(claim.generation) + "/";
}

StoreRound roundOf(Store& store, const AbortToken& abort, const RankClaim& claim) {
  StoreRound round{store, abort, keysOf(claim)};
  round.binding = claim.binding;
  round.job = claim.job;
  return round;
}

// The error that stopped this rank, with everything that it knows about itself, as far as there is memory for it.
ErrorRecord describe(const std::exception& exception, const RendezvousConfig& config, TimePoint begin) noexcept {
  ErrorRecord record = recordOf(exception, "the rendezvous failed");
  record.phase = ErrorPhase::Rendezvous;
  record.elapsed_ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
  const int own = config.job.of(config.rank);
  const bool of_another = record.rank >= 0 && record.rank != own; // which said itself who it is
  record.rank = of_another ? record.rank : own;
  try {
    record.host = of_another ? record.host : localHostName();
    record.group = config.group_name;
    record.group_ranks = config.job.list();
  } catch (const std::bad_alloc&) { // then without them
  }
  return record;
}

/// Ranks of the group do not look yet for errors that this rank could write: it knows no generation.
void noteIfAborted(Store& store, const RendezvousConfig& config, const AbortToken& abort, const ErrorRecord& record) {
  if (abort.aborted()) {
    postNotice(store, config.group_name, config.life, {config.rank, localHostName(), record.summary});
  }
}

} // namespace

Rendezvous meet(Store& store, const RendezvousConfig& config, const AbortToken& abort) {
  const TimePoint begin = Clock::now();
  const std::string prefix = "pycomm/" + config.group_name + "/";
  RankClaim claim;
  try {
    checkConfig(config);
    claim = claimRank(store, prefix, config.rank, config.job, config.takeover, config.deadline, abort);
  } catch (const std::exception& exception) {
    ErrorRecord record = describe(exception, config, begin); // does not concern the ranks that met
    noteIfAborted(store, config, abort, record);
    throw Error(std::move(record));
  }
  Notices notices(store, prefix, config.life, config.size, config.job);
  StoreRound round{store, abort, keysOf(claim), config.rank, config.size, config.deadline, begin, "", config.job};
  round.notices = &notices;
  const bool follows = config.takeover == Takeover::FromEndedRun && config.rank != 0;
  try {
    removeNotice(store, prefix, config.life, config.rank); // of an earlier run, which could not come
    const int64_t newest_before = follows ? lastClaimOfRankZero(store, prefix) : 0;
    for (;;) {
      try {
        if (follows) {
          const Generation found = findGeneration(round, prefix, newest_before);
          claim.generation = found.number;
          round.over = found.over;
          round.prefix = keysOf(claim);
          round.binding.clear();
          round.members.clear();
        }
        Rendezvous met = meetAs(round, config);
        claim.binding = bindingOf(met.transcript);
        met.claim = claim;
        return met;
      } catch (const GenerationOver&) {
        claim.generation = 0; // it was an earlier run's
      }
    }
  } catch (const std::exception& exception) {
    ErrorRecord record = describe(exception, config, begin);
    if (claim.generation > 0) {
      record = round.failTogether(std::move(record));
      acknowledgeFailure(store, claim, config, record);
    } else {
      noteIfAborted(store, config, abort, record);
    }
    leave(store, claim);
    throw Error(std::move(record));
  }
}

void refuseToJoin(Store& store, const RendezvousConfig& config, const std::string& reason) noexcept {
  try {
    const TimePoint begin = Clock::now();
    const AbortToken none;
    checkConfig(config);
    const std::string prefix = "pycomm/" + config.group_name + "/";
    const RankClaim claim = claimRank(store, prefix, config.rank, config.job, config.takeover, config.deadline, none);
    if (claim.generation > 0) { // else only rank 0's next claim would tell which one it is
      ErrorRecord record = describe(Error(ErrorCode::ConfigMismatch, reason), config, begin);
      record = roundOf(store, none, claim).failTogether(std::move(record));
      acknowledgeFailure(store, claim, config, record);
    }
    leave(store, claim);
  } catch (const std::exception&) { // the caller raises the reason
  }
}

ErrorRecord tellFailure(Store& store, const RankClaim& claim, ErrorRecord record) noexcept {
  try {
    const AbortToken none;
    const StoreRound round = roundOf(store, none, claim);
    return round.failTogether(std::move(record));
  } catch (const std::exception&) {
    return record; // no memory for a key
  }
}

// Anybody may write that a rank has read it, so this is without a seal: it shortens the wait, and no more.
void acknowledgeFailure(
    Store& store,
    const RankClaim& claim,
    const RendezvousConfig& config,
    const ErrorRecord& record) noexcept {
  try {
    const std::string prefix = keysOf(claim);
    const auto keyOf = [&](const char* what, int reader) { return prefix + what + "/" + std::to_string(reader); };
    store.setUnsealed(keyOf("read", config.rank), "1");
    const bool all_may_come = record.code != ErrorCode::RendezvousTimeout && record.code != ErrorCode::Aborted;
    const Deadline end = Deadline::after(config.serves_store ? kOneStepMs : 0);
    // A rank that finds another world size may be outside this one.
    const int outside = record.code == ErrorCode::ConfigMismatch && config.job.numbers().empty() ? record.peer + 1 : 0;
    const int readers = std::min(kMaxRanks, std::max(config.size, outside));
    for (int reader = 0; reader < readers && !end.expired();) {
      if (reader == config.rank || store.has(keyOf("read", reader)) ||
          !(all_may_come || store.has(keyOf("member", reader)))) {
        ++reader;
      } else {
        (void)::poll(nullptr, 0, end.remainingMs(kShortPauseMs));
      }
    }
  } catch (const std::exception&) { // without the store, or memory, every rank finds out by itself
  }
}

std::vector<std::string> exchangeTexts(
    Store& store,
    const RankClaim& claim,
    int size,
    const std::string& key,
    const std::string& mine,
    Deadline deadline,
    const AbortToken& abort) {
  const StoreRound round{
      store, abort, keysOf(claim), claim.rank, size, deadline, Clock::now(), claim.binding, claim.job};
  std::vector<std::string> texts = round.gather(
      key, mine, [](int, const std::string&) {}, [&](int rank, const std::string&) { return claim.job.text(rank); });
  for (std::string& text : texts) {
    text = printable(text, kMaxTextNbytes);
  }
  return texts;
}

// Not when the group closes: its store may have gone by then, or not answer, and torch waits for a deletion without a bound.
void forgetMeeting(Store& store, const RankClaim& claim, int size) noexcept {
  try {
    const std::string keys = keysOf(claim);
    if (store.add(keys + "over", 1) < size) {
      return; // others read yet
    }
    store.set(keys + kMade, "1"); // before the list goes: a rank that asks finds one of the two
    for (const std::string& round :
         {std::string("member"),
          claim.binding + "address",
          claim.binding + "port",
          claim.binding + kSharedMemoryRound}) {
      removeList(store, keys, round);
      // Rank 0's first record stays: ranks with another secret, or of another world size, find out by it.
      for (int rank = round == "member" ? 1 : 0; rank < size; ++rank) {
        (void)store.remove(keys + round + "/" + std::to_string(rank));
      }
    }
    if (store.has(keys + "error")) { // one of them did not make the group, and all know why
      for (int rank = 0; rank < size; ++rank) {
        (void)store.remove(keys + "read/" + std::to_string(rank));
      }
      for (const std::string& key : {claim.binding + "error", std::string("error"), std::string("errors")}) {
        (void)store.remove(keys + key);
      }
    }
    (void)store.remove(keys + "over");
  } catch (const std::exception&) { // the store is gone, with what it held
  }
}

void throwIfFailed(Store& store, const RankClaim& claim) {
  const AbortToken none;
  roundOf(store, none, claim).throwIfFailed();
}

} // namespace pycomm
