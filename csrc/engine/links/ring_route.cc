#include "engine/links/ring_route.h"

#include <string>

#include "base/error.h"
#include "base/fault_point.h"
#include "base/log.h"

namespace pycomm {

void RingRoute::share(HostRings rings) {
  rings_ = std::move(rings);
  way_ = Way::Undecided;
}

std::vector<RingRoute::Kept> RingRoute::decide(bool all_have_them) {
  way_ = all_have_them ? Way::Rings : Way::Sockets;
  return std::exchange(kept_, {});
}

std::optional<SharedLink::Rings> RingRoute::take(int peer, bool& used) {
  if (way_ != Way::Rings || !rings_->holds(peer)) {
    return std::nullopt;
  }
  try {
    PYCOMM_FAULT_POINT("ring.commit");
    rings_->commit(identity_.rank, peer);
  } catch (const Error& error) {
    way_ = Way::Sockets; // logged once
    log(LogLevel::Info,
        identity_.text() + ": what " + identity_.job.text(identity_.rank) +
            " sends within its host goes through sockets from now on, except what collectives share: " +
            error.record().summary);
    return std::nullopt;
  }
  if (std::exchange(used, true)) {
    return std::nullopt; // the first link broke when nothing needed it
  }
  return SharedLink::Rings{rings_->arena, rings_->between(identity_.rank, peer), std::nullopt};
}

SharedLink::Rings RingRoute::incoming(int peer) const {
  if (!rings_ || !rings_->holds(peer) || peer == identity_.rank) {
    throw Error(
        ErrorCode::ProtocolViolation,
        identity_.job.text(peer) + " would send through memory that it does not share with this rank");
  }
  return SharedLink::Rings{rings_->arena, std::nullopt, rings_->between(peer, identity_.rank)};
}

} // namespace pycomm
