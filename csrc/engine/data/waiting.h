#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/job_ranks.h"
#include "engine/data/tables.h"

/// The questions of an operation that waits: which ranks have not entered it yet. And all deadlines of entered operations.
///
/// A rank that has waited 2 ms sends a question (Waiting) to the ranks on unfinished edges of its operation, once. They compare the
/// descriptor, or answer that they have not entered the operation (NotEntered). After 200 ms it asks all ranks, so that an error names
/// the rank that is late and not a neighbour that waits as well. It asks them twice more: an answer may be lost on its way, or be true no
/// more. Bytes that arrive begin the wait anew, but not the count of questions. If many operations are under way, only the oldest ask:
/// questions about hundreds would keep data waiting on a slow link.
namespace pycomm::waiting {

// ---- events
void tick(Tables& tables, TimePoint now);
/// Bytes of the operation have arrived.
void progressed(OperationRow& row, TimePoint now) noexcept;
/// Of an operation in shared memory, which shows there who has entered it: only these ranks, which lack, are asked about it, or nobody.
/// They are asked at once if none was before.
void asksOnly(Tables& tables, OperationRow& row, const std::vector<int>& ranks, TimePoint now);
/// Answers a rank that waits in something that this rank has not entered: says what this rank entered last.
void answerNotEntered(Tables& tables, int peer, uint64_t op_id, Action::Way way);

// ---- events, for matching.cc
void entered(Tables& tables, const OperationRow& row);
/// A frame shows that the peer has entered it.
void came(OperationRow& row, int peer);
/// Tells the ranks that asked before this rank entered the operation that it has. It may end here before they ask again.
void correct(Tables& tables, const OperationRow& row, const UnexpectedRow& unexpected);
/// Of a message that is entered.
void announce(Tables& tables, OperationRow& row);
/// A question (Waiting) has arrived.
void asked(Tables& tables, const OperationRow* row, int peer, const FrameHeader& header, TimePoint now);
/// An answer (NotEntered) has arrived.
void answered(Tables& tables, OperationRow* row, int peer, const FrameHeader& header, TimePoint now);

// ---- questions
[[nodiscard]] TimePoint nextTick(const Tables& tables) noexcept;
/// A Waiting that answers one, else it asks.
[[nodiscard]] bool answers(const FrameHeader& waiting) noexcept;
[[nodiscard]] bool hasCome(const OperationRow& row, int peer);
/// The lowest rank that said that it has not entered it.
[[nodiscard]] std::optional<NotEntered> missing(const OperationRow& row);
/// The same of one rank.
[[nodiscard]] std::optional<NotEntered> missing(const OperationRow& row, int peer);
/// What a NotEntered frame says, in words.
[[nodiscard]] std::string lastText(const FrameHeader& not_entered, int peer, const JobRanks& job);
/// The earliest time at which a question is due; TimePoint::max() if none is any more.
[[nodiscard]] TimePoint nextQuestion(const Tables& tables, const OperationRow& row) noexcept;

} // namespace pycomm::waiting
