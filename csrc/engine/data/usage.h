#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "engine/data/messages.h"
#include "engine/data/protocol.h"
#include "engine/data/watched_operations.h"

namespace pycomm {

/// The state that a group keeps for operations on one rank. All of it is zero when no operation is under way, here or at peers that are
/// ahead; but for what has a bound.
struct Usage : Messages::Usage, WatchedOperations::Usage {
  size_t transfers = 0;
  size_t unexpected_frames = 0;
  size_t frames = 0; ///< that have not left yet: see Outgoing
  size_t staging_nbytes = 0;
  size_t refused = 0; ///< operations that cannot begin
  uint64_t host_pending = 0; ///< of the HostPlane; the data plane does not know it
  size_t shared_links = 0; ///< open ones, of both directions; no operation's
  Protocol::Usage protocol;
};

/// What a group keeps that no operation needs, "transfers: 1, history: 300 (at most 256)"; empty if it is idle.
[[nodiscard]] std::string heldText(const Usage& usage);

} // namespace pycomm
