#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "engine/data/messages.h"
#include "engine/data/tables.h"

namespace pycomm {

/// The state that a group keeps for operations on one rank. All of it is zero when no operation is under way, here or at peers that are
/// ahead; but for what has a bound.
struct Usage : Messages::Usage {
  size_t held = 0; ///< operations whose input has not come
  size_t on_host = 0; ///< operations in shared memory that are stuck, or that a peer asked about
  size_t followed = 0; ///< operations of another library
  size_t transfers = 0;
  size_t unexpected_frames = 0;
  size_t frames = 0; ///< that have not left yet: to this rank itself, or questions for control links
  size_t staging_nbytes = 0;
  size_t refused = 0; ///< operations that cannot begin
  uint64_t host_pending = 0; ///< of the HostPlane; the data plane does not know it
  size_t shared_links = 0; ///< open ones, of both directions; no operation's
  Tables::Usage tables;
};

/// What a group keeps that no operation needs, "transfers: 1, history: 300 (at most 256)"; empty if it is idle.
[[nodiscard]] std::string heldText(const Usage& usage);

} // namespace pycomm
