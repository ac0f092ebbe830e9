// How the ranks of a group come to share memory: the first rank of each host makes it, the others ask its process for it, and then all
// say in the store whether they have it. It holds the rings of the links between ranks of that host, and where the whole group is on
// one host, what its HostPlane needs; that is used only if every rank has it.
#include <algorithm>
#include <utility>

#include "base/fault_point.h"
#include "base/log.h"
#include "base/usable_cores.h"
#include "engine/group.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

// For a first rank that is slow to come so far; one that is gone is noticed by the control links.
constexpr int kAskMs = 10000;
// Two futex calls and the switches between them cost less; a longer wait is not worth a core. Where ranks share cores, all of them
// must have had their turn in that time: measured with 4 and 8 ranks on 2 cores.
constexpr unsigned kSpinUs = 50;
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
      "use transport='auto', which falls back to TCP");
}

} // namespace

// What a rank can have. Empty texts where nothing is missing.
struct Group::OpenedMemory {
  std::shared_ptr<const SharedArena> arena;
  HostHeaps heaps;
  std::string no_arena;
  std::string no_heaps;

  [[nodiscard]] std::string vote() const {
    return !no_arena.empty() ? no_arena : (no_heaps.empty() ? kYes : kWithoutHeaps);
  }
};

// Each rank has its own heap ready for the others, who ask for it under a key of that rank.
uint64_t Group::heapKey(int rank) const noexcept {
  return mix64(identity_.nonce + static_cast<uint64_t>(rank) + 1);
}

// First has ready what others ask for, then asks: so nobody waits for somebody who waits.
Group::OpenedMemory Group::openMemory(Deadline deadline) {
  const Deadline patience = Deadline::at(std::min(deadline.instant(), Deadline::after(kAskMs).instant()));
  HostMates& mates = engine_.hostMates();
  OpenedMemory opened;
  const auto attempt = [this](std::string& trouble, const auto& body) {
    try {
      body();
    } catch (const Error& error) {
      abort_.throwIfAborted();
      trouble = error.record().summary + (error.record().cause.empty() ? "" : " (" + error.record().cause + ")");
    }
  };
  const bool one_host = topology_->hosts() == 1;
  const size_t plane_nbytes = one_host ? HostView::totalNbytes(identity_.size) : 0;
  const size_t nbytes = plane_nbytes + HostRings::totalNbytes(hostMates().size());
  const int maker = hostMates().front();
  const bool first = identity_.rank == maker;
  if (one_host) {
    attempt(opened.no_heaps, [&] {
      PYCOMM_FAULT_POINT("heap.open");
      opened.heaps.own = engine_.heap();
    });
  } else {
    opened.no_heaps = "the ranks are on several hosts";
  }
  if (first) {
    attempt(opened.no_arena, [&] {
      PYCOMM_FAULT_POINT("arena.open");
      auto arena = std::make_shared<const SharedArena>(SharedArena::create(nbytes));
      if (one_host) {
        arena->commit(0, HostView::commonNbytes(identity_.size));
      }
      opened.arena = std::move(arena);
    });
  }
  engine_.control().run([&] {
    mates.offer(heapKey(identity_.rank), opened.heaps.own == nullptr ? -1 : opened.heaps.own->fd());
    if (first) {
      mates.offer(identity_.nonce, opened.arena == nullptr ? -1 : opened.arena->fd());
    }
  });
  if (!first) {
    attempt(opened.no_arena, [&] {
      PYCOMM_FAULT_POINT("arena.open");
      opened.arena = std::make_shared<const SharedArena>(SharedArena::attach(
          HostMates::ask(watch_names_[static_cast<size_t>(maker)], identity_.nonce, patience, abort_), nbytes));
    });
  }
  for (int rank = 0; rank < identity_.size && opened.no_heaps.empty() && opened.no_arena.empty(); ++rank) {
    attempt(opened.no_heaps, [&] {
      const std::string& name = watch_names_[static_cast<size_t>(rank)];
      const bool own = rank == identity_.rank;
      opened.heaps.mapped.push_back(
          own ? nullptr : engine_.heapOf(name, [&] { return HostMates::ask(name, heapKey(rank), patience, abort_); }));
      const auto& mapped = opened.heaps.mapped.back();
      opened.heaps.ranges.push_back(own ? opened.heaps.own->range() : BufferView(mapped->at(0), mapped->nbytes()));
    });
  }
  if (opened.arena != nullptr) { // before this rank says that it has it: from then on others may send through it
    HostRings rings;
    rings.arena = opened.arena;
    rings.begin = plane_nbytes;
    rings.ranks = hostMates();
    engine_.lane().run([&] { planes_.data()->shareRings(std::move(rings)); });
  }
  return opened;
}

size_t Group::sharedLinks() {
  size_t links = 0;
  engine_.lane().run([&] {
    const DataPlane* const data = planes_.data();
    links = data == nullptr ? 0 : data->usage().shared_links;
  });
  return links;
}

// What each rank says about its memory, by rank.
std::vector<std::string> Group::shareVotes(const Config& config, OpenedMemory& opened) {
  const auto withdraw = [this] {
    engine_.control().run([this] {
      engine_.hostMates().withdraw(identity_.nonce);
      engine_.hostMates().withdraw(heapKey(identity_.rank));
    });
  };
  std::vector<std::string> votes;
  try {
    std::string vote = kAlone;
    if (hostMates().size() > kMaxHostRanks) {
      vote = "more than " + std::to_string(kMaxHostRanks) + " ranks share the host";
    } else if (hostMates().size() > 1) {
      opened = openMemory(config.rendezvous.deadline);
      vote = opened.vote();
    }
    votes = exchangeTexts(store_, claim_, identity_.size, "shared_memory", vote, config.rendezvous.deadline, abort_);
  } catch (...) {
    withdraw();
    throw;
  }
  withdraw();
  return votes;
}

// Everything that is asked for here before the store is asked is known alike on all ranks.
void Group::shareMemory(const Config& config) {
  if (identity_.size == 1 || config.transport == Transport::Tcp) {
    return;
  }
  const bool one_host = topology_->hosts() == 1;
  if (!one_host) {
    why_not_shared_ = "the ranks are on several hosts";
    if (config.transport == Transport::SharedMemory) {
      throwCannotShare(why_not_shared_);
    }
  }
  if (topology_->mostRanks() == 1) {
    if (identity_.rank == 0) {
      log(LogLevel::Info, "group " + identity_.name + " goes by TCP: " + why_not_shared_);
    }
    return;
  }
  OpenedMemory opened;
  const std::vector<std::string> votes = shareVotes(config, opened);
  int without = -1; // the first rank of this host that has no memory
  if (hostMates().size() > 1) {
    const auto found = std::find_if(
        hostMates().begin(), hostMates().end(), [&](int mate) { return !has(votes[static_cast<size_t>(mate)]); });
    without = found == hostMates().end() ? -1 : *found;
    engine_.lane().run([&] { planes_.data()->useRings(without < 0); });
  }
  if (without >= 0) {
    why_not_shared_ = "rank " + std::to_string(without) + " has none: " + votes[static_cast<size_t>(without)];
    if (config.transport == Transport::SharedMemory) {
      throwCannotShare(why_not_shared_);
    }
    if (identity_.rank == hostMates().front()) {
      log(LogLevel::Info, "group " + identity_.name + " goes by TCP: " + why_not_shared_);
    }
    return;
  }
  if (!one_host) {
    why_not_shared_ = "the ranks are on several hosts; only links within a host go through it";
    if (identity_.rank == 0) {
      log(LogLevel::Info, "group " + identity_.name + " goes by TCP between hosts, and by shared memory within them");
    }
    return;
  }
  const auto copies = std::find(votes.begin(), votes.end(), kWithoutHeaps);
  if (copies != votes.end()) {
    opened.heaps = HostHeaps();
    log(LogLevel::Info,
        "group " + identity_.name + " copies every tensor through shared memory: rank " +
            std::to_string(copies - votes.begin()) + " has no heap that others could map" +
            (opened.no_heaps.empty() ? "" : ": " + opened.no_heaps));
  }
  makeHostPlane(std::move(opened.arena), std::move(opened.heaps));
}

void Group::makeHostPlane(std::shared_ptr<const SharedArena> arena, HostHeaps heaps) {
  HostPlane::Config config;
  config.crowded = engine_.lane().crowded(); // by this group, or by a larger one whose ranks compute or wait meanwhile
  config.spin_us = static_cast<int>(
      config.crowded ? std::max(2 * kSpinUs * static_cast<unsigned>(identity_.size) / usableCores(), kSpinUs)
                     : kSpinUs);
  PYCOMM_FAULT_POINT("host.make");
  engine_.lane().run([&] { // where a failure looks for the plane
    planes_.openHost(std::move(arena), std::move(heaps), config);
    // Ranks that were faster may have called something already, and failed: nobody else would end what comes here.
    if (abort_.aborted()) {
      planes_.host()->fail(abort_.reason(), nullptr, nullptr);
    }
  });
}

} // namespace pycomm
