#pragma once

#include <string>

#include "base/error.h"
#include "engine/data_plane.h"

namespace pycomm {

// The sentences of failures, in one place, so that they read alike.

/// Anything that this rank tells about the group: by whom, where and in which group. `cause` may come from another rank.
[[nodiscard]] ErrorRecord errorOf(const ErrorRecord& cause, const GroupIdentity& identity);

/// The group's cause, as the error of one operation on this rank.
[[nodiscard]] ErrorRecord errorOf(const Operation& operation, const ErrorRecord& cause, const GroupIdentity& identity);

/// The deadline of an operation has passed.
[[nodiscard]] ErrorRecord timedOut(
    const Transfer& transfer,
    const std::optional<Protocol::Missing>& missing,
    const GroupIdentity& identity);

/// The same of a receive that never learned its sender.
[[nodiscard]] ErrorRecord unmatched(const Operation& operation, const GroupIdentity& identity);

/// A link to `peer` ended without a goodbye, or broke.
[[nodiscard]] ErrorRecord peerGone(int peer, const ErrorRecord& what, const GroupIdentity& identity);

/// `peer` closed its group in order although this operation still needs it.
[[nodiscard]] ErrorRecord peerLeftUs(int peer, const Operation& operation, const GroupIdentity& identity);

/// This rank closes its group although this operation is under way: what the others are told.
[[nodiscard]] ErrorRecord leftInTheMiddle(const Operation& operation, const GroupIdentity& identity);

} // namespace pycomm
