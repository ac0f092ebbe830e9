#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "engine/data/tables.h"

/// What the frames of one group mean on one rank, and whether the ranks have entered the same operations.
///
/// Every frame carries its operation's descriptor. It is compared with the operation of that id here. If there is none yet, the
/// operation is unexpected, and what the peer has sent is kept. Schedules may differ between the two sides of a mistake, so frames on
/// edges alone do not find every mistake: waiting.h has the questions that do.
namespace pycomm::matching {

enum class Verdict {
  Accept, ///< data of an operation that is entered here
  Keep, ///< data of an operation that is not entered here yet: an unexpected frame, which fits the pool
  Ignore, ///< nothing more to do; drop a payload
};

// ---- events
/// This rank enters the operation: its row. If it runs here, with the edges of its schedule; else it has none. `build` adds to the row what
/// needs memory, before the row counts. If this throws, the tables are as before, except that a mismatch that was found stays found.
OperationRow& entered(
    Tables& tables,
    const std::shared_ptr<Operation>& operation,
    OperationRow::Runs runs,
    TimePoint now,
    const std::function<void(OperationRow&)>& build = nullptr);
/// As if the operation had not been entered. Takes no memory.
void forget(Tables& tables, OperationRow& row) noexcept;
/// The operation has ended, and its row is out of the table.
void ended(Tables& tables, OperationRow& row);
/// An operation of this rank's that went another way, and is over. Reported late, and only if another rank asks.
void passed(Tables& tables, const OperationId& id, const Descriptor& descriptor);
/// A frame has arrived; `row` is its operation's, null if that is not entered here.
[[nodiscard]] Verdict headerArrived(
    Tables& tables,
    OperationRow* row,
    int peer,
    const FrameHeader& header,
    TimePoint now);
/// The peer broke the protocol with this frame: the group fails.
void violated(Tables& tables, int peer, const FrameHeader& header, const std::string& what);
/// Nothing counts any more. The first error wins.
void fail(Tables& tables, ErrorRecord record);

// ---- questions
/// A frame header of this group, to `peer`; of an operation that is entered, with its descriptor.
[[nodiscard]] FrameHeader headerFor(const Tables& tables, const OperationRow* row, FrameType type, int peer);
/// That peer has sent something about an operation that is not entered here; or it is entered.
[[nodiscard]] bool isKnown(const Tables& tables, int peer, uint64_t op_id) noexcept;
/// It ended here not long ago.
[[nodiscard]] bool hasEnded(const Tables& tables, uint64_t op_id) noexcept;

// ---- for waiting.cc
/// Keeps what a peer says of an unexpected operation; null if the peer contradicts what it said before.
[[nodiscard]] AheadOfUs* keep(Tables& tables, int peer, const FrameHeader& header, TimePoint now);
[[nodiscard]] bool hasPlace(const Tables& tables, int peer, uint64_t op_id, bool message);
/// It ended here long ago; or it is under way, of a counted one.
[[nodiscard]] bool isBehind(const Tables& tables, uint64_t op_id) noexcept;
/// Writes the operation that was entered last into an answer: its descriptor, and its id as `aux`.
void writeLast(const Tables& tables, FrameHeader& header);

} // namespace pycomm::matching
