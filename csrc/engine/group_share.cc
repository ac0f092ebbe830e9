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
constexpr int kSpinUs =
    50; // two futex calls and the switches between them cost less; a longer wait is not worth a core
const std::string kYes = "yes";

} // namespace

std::shared_ptr<const SharedArena> Group::openArena(Deadline deadline) {
  PYCOMM_FAULT_POINT("arena.open");
  const size_t nbytes = HostView::totalNbytes(identity_.size);
  if (identity_.rank == 0) {
    auto arena = std::make_shared<const SharedArena>(SharedArena::create(nbytes));
    arena->commit(0, HostView::commonNbytes(identity_.size));
    return arena;
  }
  const Deadline patience = Deadline::at(std::min(deadline.instant(), Deadline::after(kAskMs).instant()));
  return std::make_shared<const SharedArena>(
      SharedArena::attach(HostMates::ask(watch_names_.front(), identity_.nonce, patience, abort_), nbytes));
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
    std::shared_ptr<const SharedArena> arena;
    std::string mine = kYes;
    try {
      arena = openArena(config.rendezvous.deadline);
    } catch (const Error& error) {
      abort_.throwIfAborted();
      mine = error.record().summary + (error.record().cause.empty() ? "" : " (" + error.record().cause + ")");
    }
    HostMates& mates = engine_.hostMates();
    if (identity_.rank == 0) {
      engine_.control().run([&] { mates.offer(identity_.nonce, arena == nullptr ? -1 : arena->fd()); });
    }
    std::vector<std::string> votes;
    try {
      votes = exchangeTexts(store_, claim_, identity_.size, "shared_memory", mine, config.rendezvous.deadline, abort_);
    } catch (...) {
      engine_.control().run([&] { mates.withdraw(identity_.nonce); });
      throw;
    }
    engine_.control().run([&] { mates.withdraw(identity_.nonce); });
    const auto no = std::find_if(votes.begin(), votes.end(), [](const std::string& vote) { return vote != kYes; });
    if (no == votes.end()) {
      makeHostPlane(std::move(arena));
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

void Group::makeHostPlane(std::shared_ptr<const SharedArena> arena) {
  HostPlane::Config config;
  config.spin_us = static_cast<unsigned>(identity_.size) <= std::thread::hardware_concurrency() ? kSpinUs : 0;
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
  host_ = std::make_unique<HostPlane>(identity_, std::move(arena), config, std::move(events));
  engine_.lane().run([&] { data_->accompany(host_.get()); });
}

} // namespace pycomm
