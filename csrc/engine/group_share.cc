// How the ranks of a group come to share memory: rank 0 makes it, the others ask its process for it, and it is used only if every
// rank has it.
#include <algorithm>
#include <thread>
#include <utility>

#include "base/fault_point.h"
#include "base/log.h"
#include "engine/failure_text.h"
#include "engine/group.h"
#include "engine/host_plane.h"

namespace pycomm {
namespace {

constexpr int kAskMs = 10000; // a rank 0 that is slow to come so far; one that is gone is noticed by the control links
// Two futex calls and the switches between them cost less; a longer wait is not worth a core. Where ranks share cores, all of them
// must have had their turn in that time: measured with 4 and 8 ranks on 2 cores.
constexpr unsigned kSpinUs = 50;
const std::string kYes = "yes";
const std::string kWithoutHeaps = "yes, without heaps";

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
  const size_t nbytes = HostView::totalNbytes(identity_.size);
  const bool first = identity_.rank == 0;
  attempt(opened.no_heaps, [&] {
    PYCOMM_FAULT_POINT("heap.open");
    opened.heaps.own = engine_.heap();
  });
  if (first) {
    attempt(opened.no_arena, [&] {
      PYCOMM_FAULT_POINT("arena.open");
      auto arena = std::make_shared<const SharedArena>(SharedArena::create(nbytes));
      arena->commit(0, HostView::commonNbytes(identity_.size));
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
      opened.arena = std::make_shared<const SharedArena>(
          SharedArena::attach(HostMates::ask(watch_names_.front(), identity_.nonce, patience, abort_), nbytes));
    });
  }
  for (int rank = 0; rank < identity_.size && opened.no_heaps.empty() && opened.no_arena.empty(); ++rank) {
    attempt(opened.no_heaps, [&] {
      const std::string& name = watch_names_[static_cast<size_t>(rank)];
      const bool own = rank == identity_.rank;
      opened.heaps.mapped.push_back(
          own ? nullptr : engine_.heapOf(name, [&] { return HostMates::ask(name, heapKey(rank), patience, abort_); }));
      opened.heaps.bases.push_back(own ? opened.heaps.own->base() : opened.heaps.mapped.back()->at(0));
    });
  }
  return opened;
}

// Everything that is asked for here before the store is asked is known alike on all ranks.
void Group::shareMemory(const Config& config) {
  if (identity_.size == 1 || config.transport == Transport::Tcp) {
    return;
  }
  std::string why;
  if (host_mates_.size() != static_cast<size_t>(identity_.size)) {
    why = "the ranks are on several hosts";
  } else if (identity_.size > kMaxHostRanks) {
    why = "more than " + std::to_string(kMaxHostRanks) + " ranks share the host";
  } else {
    std::vector<std::string> votes;
    const auto withdraw = [this] {
      engine_.control().run([this] {
        engine_.hostMates().withdraw(identity_.nonce);
        engine_.hostMates().withdraw(heapKey(identity_.rank));
      });
    };
    OpenedMemory opened;
    try {
      opened = openMemory(config.rendezvous.deadline);
      votes = exchangeTexts(
          store_, claim_, identity_.size, "shared_memory", opened.vote(), config.rendezvous.deadline, abort_);
    } catch (...) {
      withdraw();
      throw;
    }
    withdraw();
    const auto no = std::find_if(
        votes.begin(), votes.end(), [](const std::string& vote) { return vote != kYes && vote != kWithoutHeaps; });
    if (no == votes.end()) {
      const auto without = std::find(votes.begin(), votes.end(), kWithoutHeaps);
      if (without != votes.end()) {
        opened.heaps = HostHeaps();
        log(LogLevel::Info,
            "group " + identity_.name + " copies every tensor through shared memory: rank " +
                std::to_string(without - votes.begin()) + " has no heap that others could map" +
                (opened.no_heaps.empty() ? "" : ": " + opened.no_heaps));
      }
      makeHostPlane(std::move(opened.arena), std::move(opened.heaps));
      return;
    }
    why = "rank " + std::to_string(no - votes.begin()) + " has none: " + *no;
  }
  if (config.transport == Transport::SharedMemory) {
    throw Error(
        ErrorCode::Unsupported,
        "The ranks cannot share memory: " + why + ".",
        "use transport='auto', which falls back to TCP");
  }
  why_not_shared_ = why;
  if (identity_.rank == 0) {
    log(LogLevel::Info, "group " + identity_.name + " goes by TCP: " + why);
  }
}

void Group::makeHostPlane(std::shared_ptr<const SharedArena> arena, HostHeaps heaps) {
  HostPlane::Config config;
  const auto ranks = static_cast<unsigned>(identity_.size);
  const unsigned cores = std::max(std::thread::hardware_concurrency(), 1U);
  config.crowded = ranks > cores;
  config.spin_us = static_cast<int>(config.crowded ? 2 * kSpinUs * ranks / cores : kSpinUs);
  // The plane is closed by close() before the loops let go of this object: `this` is alive in every call.
  HostPlane::Events events;
  events.notice = [this](ErrorRecord record) {
    engine_.control().post([this, record = std::move(record)] {
      if (control_ != nullptr) {
        control_->notice(record);
      }
    });
  };
  events.stuck = [this](std::shared_ptr<Operation> operation) {
    engine_.lane().post([this, operation = std::move(operation)] {
      if (data_ != nullptr) {
        data_->hostStuck(operation);
      }
    });
  };
  events.unstuck = [this](uint64_t op_id) {
    engine_.lane().post([this, op_id] {
      if (data_ != nullptr) {
        data_->hostUnstuck(op_id);
      }
    });
  };
  host_ = std::make_unique<HostPlane>(identity_, std::move(arena), std::move(heaps), config, std::move(events));
  engine_.lane().run([&] { data_->accompany(host_.get()); });
}

} // namespace pycomm
