#include "engine/memory_sharing.h"

#include <algorithm>
#include <utility>

#include "base/fault_point.h"
#include "base/log.h"
#include "base/process_limits.h"
#include "engine/operation/issue_context.h"

namespace pycomm {
namespace {

const std::string kYes = "yes";
const std::string kWithoutHeaps = "yes, without heaps";
const std::string kAlone = "alone on its host";

bool has(const std::string& vote) {
  return vote == kYes || vote == kWithoutHeaps;
}

[[noreturn]] void throwCannotShare(const std::string& why) {
  throw Error(
      ErrorCode::Unsupported,
      "The ranks cannot share memory: " + why + ".",
      "use transport='auto', which falls back to sockets");
}

/// Runs `body`; if it throws an Error and the group has not failed, `trouble` gets its text.
template <typename Body>
void attempt(const AbortToken& failed, std::string& trouble, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    failed.throwIfAborted();
    trouble = error.record().summary + (error.record().cause.empty() ? "" : " (" + error.record().cause + ")");
  }
}

} // namespace

// What this rank has. Empty texts where nothing is missing.
struct MemorySharing::Opened {
  std::shared_ptr<const SharedArena> arena;
  HostHeaps heaps;
  std::string no_arena;
  std::string no_heaps;

  [[nodiscard]] std::string vote() const {
    return !no_arena.empty() ? no_arena : (no_heaps.empty() ? kYes : kWithoutHeaps);
  }
};

// Each rank has its own heap ready for the others, who ask for it under a key of that rank.
MemoryKey MemorySharing::heapKey(int rank) const noexcept {
  const uint64_t number = static_cast<uint64_t>(rank) + 1;
  return {mix64(identity_.memory_key.high + number), mix64(identity_.memory_key.low + number)};
}

void MemorySharing::logWithout(const std::string& why) const {
  log(LogLevel::Info, identity_.text() + " uses no shared memory: " + why);
}

// First has ready what others ask for, then asks: so nobody waits for somebody who waits.
void MemorySharing::open(Deadline deadline, Opened& opened) {
  // For a first rank that is slow to come so far; one that is gone is noticed by the control links.
  const Deadline patience = Deadline::at(std::min(deadline.instant(), Deadline::after(kSureToComeMs).instant()));
  const bool one_host = roster_.topology.hosts() == 1;
  const std::vector<int32_t>& local_peers = roster_.localRanks();
  const auto on_host = static_cast<int>(local_peers.size());
  const size_t plane_nbytes = one_host ? HostView::totalNbytes(on_host) : 0;
  const int maker = local_peers.front();
  const bool first = identity_.rank == maker;
  const size_t nbytes = plane_nbytes + HostRings::totalNbytes(local_peers.size());
  SharedHeap::sharedBy(
      local_peers.size()); // also in a group of several hosts: its ranks are there when a smaller group commits memory
  const size_t at_once = SharedHeap::atOnce();
  if (one_host) {
    attempt(failed_, opened.no_heaps, [&] {
      PYCOMM_FAULT_POINT("heap.open");
      opened.heaps.own = engine_.heap();
    });
  } else {
    opened.no_heaps = "the ranks are on several hosts";
  }
  if (first) {
    attempt(failed_, opened.no_arena, [&] {
      PYCOMM_FAULT_POINT("arena.open");
      auto arena = std::make_shared<const SharedArena>(SharedArena::create(nbytes));
      if (one_host) {
        arena->commit(0, HostView::commonNbytes(on_host), at_once);
      }
      opened.arena = std::move(arena);
    });
  }
  engine_.control().run([&] {
    LocalPeers& local_peers = engine_.localPeers();
    const std::shared_ptr<SharedHeap>& heap = opened.heaps.own;
    local_peers.offer(heapKey(identity_.rank), {heap, heap == nullptr ? nullptr : &heap->arena()});
    if (first) {
      local_peers.offer(identity_.memory_key, opened.arena);
    }
  });
  if (!first) {
    attempt(failed_, opened.no_arena, [&] {
      PYCOMM_FAULT_POINT("arena.open");
      opened.arena = std::make_shared<const SharedArena>(SharedArena::attach(
          LocalPeers::ask(roster_.watch_names[static_cast<size_t>(maker)], identity_.memory_key, patience, failed_),
          nbytes));
    });
  }
  if (one_host && opened.no_arena.empty()) {
    // Stages get their pages with the first large operation, since most groups never have one. If there is no room for them now, sockets
    // serve the group; if there is none then, that operation is an error.
    attempt(failed_, opened.no_arena, [&] {
      SharedArena::expectRoom(plane_nbytes - HostView::commonNbytes(on_host), at_once);
    });
  }
  for (size_t i = 0; i < local_peers.size() && opened.no_heaps.empty() && opened.no_arena.empty(); ++i) {
    attempt(failed_, opened.no_heaps, [&] { mapHeap(opened.heaps, local_peers[i], patience); });
  }
  if (opened.arena != nullptr) { // before this rank says that it has it: from then on others may send through it
    HostRings rings;
    rings.arena = opened.arena;
    rings.begin = plane_nbytes;
    rings.ranks = local_peers;
    rings.at_once = at_once;
    engine_.dataLoop().run([&] { planes_.data()->shareRings(std::move(rings)); });
  }
}

void MemorySharing::mapHeap(HostHeaps& heaps, int rank, Deadline patience) {
  if (rank == identity_.rank) {
    heaps.mapped.push_back(nullptr);
    heaps.ranges.push_back(heaps.own->range());
    return;
  }
  const std::string& name = roster_.watch_names[static_cast<size_t>(rank)];
  heaps.mapped.push_back(engine_.heapOf(name, [&] { return LocalPeers::ask(name, heapKey(rank), patience, failed_); }));
  heaps.ranges.emplace_back(heaps.mapped.back()->at(0), heaps.mapped.back()->nbytes());
}

// What each rank says about its memory, by rank.
std::vector<std::string> MemorySharing::vote(Deadline deadline, Opened& opened) {
  const auto withdraw = [this] {
    engine_.control().run([this] {
      engine_.localPeers().withdraw(identity_.memory_key);
      engine_.localPeers().withdraw(heapKey(identity_.rank));
    });
  };
  std::vector<std::string> votes;
  try {
    std::string vote = kAlone;
    if (roster_.localRanks().size() > kMaxHostRanks) {
      vote = "more than " + std::to_string(kMaxHostRanks) + " ranks share the host";
    } else if (roster_.localRanks().size() > 1) {
      open(deadline, opened);
      vote = opened.vote();
    }
    votes = exchangeTexts(store_, roster_.claim, identity_.size, kSharedMemoryRound, vote, deadline, failed_);
  } catch (...) {
    withdraw();
    throw;
  }
  withdraw();
  return votes;
}

// Everything that is asked for here before the store is asked is known alike on all ranks.
std::string MemorySharing::share(Transport transport, Deadline deadline) {
  if (identity_.size == 1 || transport == Transport::Tcp) {
    return "";
  }
  const bool one_host = roster_.topology.hosts() == 1;
  const std::string several = "the ranks are on several hosts";
  if (!one_host && transport == Transport::SharedMemory) {
    throwCannotShare(several);
  }
  if (roster_.topology.mostRanks() == 1) {
    if (identity_.rank == 0) {
      logWithout(several);
    }
    return several;
  }
  const std::vector<int32_t>& local_peers = roster_.localRanks();
  Opened opened;
  const std::vector<std::string> votes = vote(deadline, opened);
  int without = -1; // the first rank of this host that has no memory
  if (local_peers.size() > 1) {
    const auto found = std::find_if(local_peers.begin(), local_peers.end(), [&](int local_peer) {
      return !has(votes[static_cast<size_t>(local_peer)]);
    });
    without = found == local_peers.end() ? -1 : *found;
    engine_.dataLoop().run([&] { planes_.data()->useRings(without < 0); });
  }
  if (without >= 0) {
    std::string why = identity_.job.text(without) + " has none: " + votes[static_cast<size_t>(without)];
    if (transport == Transport::SharedMemory) {
      throwCannotShare(why);
    }
    if (identity_.rank == local_peers.front()) {
      logWithout(why);
    }
    return why;
  }
  if (!one_host) {
    if (identity_.rank == 0) {
      log(LogLevel::Info, identity_.text() + " uses TCP between hosts, and shared memory within them");
    }
    return several + "; only links within a host go through it";
  }
  const auto copies = std::find(votes.begin(), votes.end(), kWithoutHeaps);
  if (copies != votes.end()) {
    opened.heaps = HostHeaps();
    log(LogLevel::Info,
        identity_.text() + " copies every tensor through shared memory: " +
            identity_.job.text(static_cast<int>(copies - votes.begin())) + " has no heap that others could map" +
            (opened.no_heaps.empty() ? "" : ": " + opened.no_heaps));
  }
  openHostPlane(std::move(opened));
  return "";
}

void MemorySharing::openHostPlane(Opened opened) {
  HostPlane::Config config;
  config.ranks = roster_.localRanks();
  config.crowded =
      engine_.dataLoop().crowded(); // by this group, or by a larger one whose ranks compute or wait meanwhile
  // Where ranks share cores, all of them must have had their turn in that time: measured with 4 and 8 ranks on 2 cores.
  const auto spin_us = static_cast<unsigned>(kRoundTrip.count());
  config.spin_us = static_cast<int>(
      config.crowded ? std::max(2 * spin_us * static_cast<unsigned>(config.ranks.size()) / usableCores(), spin_us)
                     : spin_us);
  PYCOMM_FAULT_POINT("host.make");
  engine_.control().run([&] { // where a failure looks for the plane
    planes_.openHost(std::move(opened.arena), std::move(opened.heaps), std::move(config));
    // Ranks that were faster may have called something already, and failed: nobody else would end what comes here.
    if (failed_.aborted()) {
      planes_.host()->fail(failed_.reason(), nullptr, nullptr);
    }
  });
  engine_.dataLoop().run(
      [] {}); // the data plane knows it now, and which ends were asked for, before an operation begins
}

} // namespace pycomm
