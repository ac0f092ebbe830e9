#pragma once

#include <cstdint>
#include <vector>

#include "engine/data/tables.h"

/// Flow control of one group on one rank: how much may be sent to whom.
///
/// The reader never stops reading a link, so everything sent must have a place to go:
///   - the first 64 KiB of an edge may go eagerly, into a pool of 1 MiB that each receiver keeps for each peer. A frame costs its
///     payload and 64 bytes more, so the pool also bounds how many frames a peer can be ahead by, empty ones among them;
///   - more goes against credit: the receiver of an edge says how many bytes of it may be sent in all (like a QUIC stream limit),
///     once its operation is entered, and raises that as it consumes.
/// Pool room is given back in lumps as it is consumed. When more than half of the pool holds bytes of operations that are not entered
/// here, every operation that is gets explicit credit, so that a sender that finds the pool full can still finish what is waited for.
/// Credit is for what has yet to arrive: an edge that has all its frames gets none. So credit that arrives after its operation
/// has ended was granted while the last frames were on their way; the sender knows those operations (PeerRow::past) and drops it.
///
/// Example: rank 0 sends 100 bytes to rank 1. maySend() says Eager; 164 bytes of rank 1's pool are taken. Rank 1 consumes the frame, and
/// once it has consumed a quarter of its pool it grants so many bytes of operation 0, which frees that room at rank 0.
namespace pycomm::credit {

enum class Permission { No, Eager, Credit };

// ---- events
/// Gives the row its edges. `unexpected`: what came of the operation before; null if nothing did.
void entered(Tables& tables, OperationRow& row, const PreparedSchedule& schedule, const UnexpectedRow* unexpected);
void ended(Tables& tables, OperationRow& row);
/// As if it had not been entered. Takes no memory.
void forget(Tables& tables, OperationRow& row) noexcept;
/// The header of a data frame has arrived; `row` is null if its operation is not entered here. Null, or why no peer that keeps to the
/// protocol sends it.
[[nodiscard]] const char* headerArrived(Tables& tables, OperationRow* row, int peer, int64_t nbytes, bool eager);
/// The bytes of one data frame have been used and their memory is free again. Called for frames of 0 bytes, too.
void consumed(Tables& tables, OperationRow& row, int peer, int64_t nbytes, bool eager);
/// The peer has granted credit, of the operation or of its pool. Null, or why no peer that keeps to the protocol grants it.
[[nodiscard]] const char* granted(Tables& tables, OperationRow& row, int peer, int64_t limit);
[[nodiscard]] const char* grantedAhead(Tables& tables, AheadOfUs& ahead, int peer, int64_t limit);
[[nodiscard]] const char* gaveRoomBack(Tables& tables, int peer, int64_t nbytes);
/// The peer has sent something about an operation that is entered here, so it has entered that, too.
void shown(Tables& tables, OperationRow& row, int peer);
void queued(Tables& tables, EdgeRow& edge, int64_t nbytes, Permission used);

// ---- questions
[[nodiscard]] Permission maySend(const Tables& tables, const EdgeRow& edge, int64_t nbytes);
/// So much may go eagerly now, in so many frames.
[[nodiscard]] bool hasRoom(const Tables& tables, int peer, int64_t nbytes, size_t frames);
/// Credit for an operation that has ended here, and did without.
[[nodiscard]] bool isPast(const Tables& tables, int peer, uint64_t op_id);
/// The operation has still to send to `peer`, and has no credit for that.
[[nodiscard]] bool lacksCredit(const OperationRow& row, int peer);
/// Peers from which bytes are due or to which frames have still to go, the former first; a peer may be in it twice.
[[nodiscard]] std::vector<int> unfinished(const OperationRow& row);
/// Receivers of a message for which it cannot go eagerly.
[[nodiscard]] std::vector<int> withoutRoom(const Tables& tables, const OperationRow& row);

} // namespace pycomm::credit
