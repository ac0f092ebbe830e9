#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/not_entered.h"
#include "engine/operation/operation.h"

namespace pycomm {

// The sentences of failures, in one place, so that they read alike.

/// Out of descriptors or memory: with who it is that lacks them, and how many descriptors its group takes.
[[nodiscard]] ErrorRecord withNeed(ErrorRecord record, const GroupIdentity& identity);
[[nodiscard]] ErrorRecord cannotAccept(const ErrorRecord& trouble, const GroupIdentity& identity);
/// While the group forms, `peer`, which was to connect to this rank, has not, by the deadline.
[[nodiscard]] ErrorRecord neverConnected(int peer, const GroupIdentity& identity);
/// Lines of the log while a group forms: this rank still tries to connect to `peer`, or waits for `missing` to connect to it.
[[nodiscard]] std::string stillConnecting(
    int peer,
    const SocketAddress& remote,
    int64_t waited_s,
    const std::string& trouble,
    const GroupIdentity& identity);
[[nodiscard]] std::string stillUnconnected(
    const std::vector<int>& missing,
    int64_t waited_s,
    const GroupIdentity& identity);
/// Anything that this rank tells about the group: by whom, where and in which group. `cause` may come from another rank.
[[nodiscard]] ErrorRecord errorOf(const ErrorRecord& cause, const GroupIdentity& identity);

/// The group's cause, as the error of one operation on this rank.
[[nodiscard]] ErrorRecord errorOf(const Operation& operation, const ErrorRecord& cause, const GroupIdentity& identity);

/// The deadline of an operation has passed. `waits_for`: a rank that is behind with it, if none is `missing`; -1: none is.
[[nodiscard]] ErrorRecord timedOut(
    const Operation& operation,
    int64_t bytes_done,
    int64_t bytes_total,
    int waits_for,
    const std::optional<NotEntered>& missing,
    const GroupIdentity& identity);

/// The same of one whose input has not come from its device.
[[nodiscard]] ErrorRecord inputLate(const Operation& operation, int64_t bytes_total, const GroupIdentity& identity);

/// The same of a receive that never learned its sender.
[[nodiscard]] ErrorRecord unmatched(const Operation& operation, const GroupIdentity& identity);

/// Whether the code speaks of the process that noticed it, and of no other.
[[nodiscard]] bool isOwnTrouble(ErrorCode code) noexcept;

/// An exception that ended something on a native thread. What concerns this process alone (memory, files, threads) names this
/// rank.
[[nodiscard]] ErrorRecord recordOfThrown(const std::exception_ptr& exception, const GroupIdentity& identity);

/// The record that `make` returns, or if memory is lacking to make it, one without any sentence. For operations, which must end in any
/// case.
template <typename Make>
[[nodiscard]] ErrorRecord recordInAnyCase(const GroupIdentity& identity, const Make& make) noexcept {
  try {
    return make();
  } catch (...) {
    ErrorRecord record = noMemoryLeft();
    record.rank = record.peer = identity.jobRank();
    return record;
  }
}

/// The hint of a PEER_DEAD.
inline constexpr const char* kWhyItEnded =
    "look for the first error in that rank's log; if there is none, check that host's kernel log (dmesg) for the "
    "out-of-memory killer";
/// A link to `peer` ended without a goodbye, or broke. Of DataCorrupt: changedOnTheWay().
[[nodiscard]] ErrorRecord peerGone(int peer, const ErrorRecord& what, const GroupIdentity& identity);

/// DataCorrupt of a link to `peer`: names the rank that sent the bytes, which is this one if `what` names this end.
[[nodiscard]] ErrorRecord changedOnTheWay(int peer, const ErrorRecord& what, const GroupIdentity& identity);

/// A link to `peer` broke although that rank is still there: as peerGone() tells it, `what`, for another reason.
[[nodiscard]] ErrorRecord linkLost(int peer, const ErrorRecord& what, const GroupIdentity& identity);

/// A connection to `peer` did not come about. A refusal, or a reply that is not valid, names that rank, and a changed one its sender; another error stays as it is.
[[nodiscard]] ErrorRecord refusedBy(int peer, const ErrorRecord& what, const GroupIdentity& identity);

/// `peer` closed its group in order although this operation still needs it.
[[nodiscard]] ErrorRecord peerLeftUs(int peer, const Operation& operation, const GroupIdentity& identity);

/// This rank closes its group although this operation is under way: the error that the others get.
[[nodiscard]] ErrorRecord leftInTheMiddle(const Operation& operation, const GroupIdentity& identity);

/// What this rank tells the others before it leaves a group because another group of its process has failed.
[[nodiscard]] ErrorRecord failedBeside(const ErrorRecord& failure, const GroupIdentity& identity);

/// `left` (PeerLeft), with what the rank that left told before.
[[nodiscard]] ErrorRecord leftBecause(ErrorRecord left, const ErrorRecord& why);

} // namespace pycomm
