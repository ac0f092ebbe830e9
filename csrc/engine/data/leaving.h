#pragma once

#include <chrono>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/data/tables.h"

/// Which ranks have left the group, which links broke, and when either is a failure.
///
/// A rank that leaves in order says goodbye on each of its links, but these links are independent: a goodbye may arrive before bytes
/// that were sent earlier on another link, and the end of a link may arrive before the goodbye that explains it. So:
///   - Goodbye. Operations that still have to send to that rank fail at once (PeerLeft). Operations that wait for it fail when the link
///     that it opened has ended. If it has not opened that link yet, the link has 3 s to arrive.
///   - A broken link on which this rank writes. The goodbye has 40 ms to arrive on another link. After that the break is a failure
///     (PeerDead) if bytes still have to go out on the link. If this rank only waits for bytes, they come on the peer's own link,
///     which has 3 s. If nothing is due in either direction, the rank is lost: it fails only operations that need it later, to send to it,
///     or for more of its bytes than go without credit (credit.h), which this rank could not give.
///   - The end of the link that the peer opened, without a goodbye, is a failure at once.
///   - If the peer had left, and its last bytes were changed on their way, the first operation that may need them fails with that.
/// Example, rank 0 of 2: the write to rank 1 fails at 0 ms. Rank 1's goodbye arrives on the control link at 3 ms: rank 1 has left, and
/// no operation needs it, so nothing fails. Without the goodbye, rank 0 reports rank 1 as dead at 40 ms.
namespace pycomm::leaving {

// ---- events
/// The peer's goodbye has arrived, on a bulk link or on its control link.
void saidGoodbye(Tables& tables, int peer, TimePoint now);
/// The link that the peer opened has ended, or broke (PeerRow::reading says so). `gone`: the error if no goodbye explains it.
void readingEnded(Tables& tables, int peer, ErrorRecord gone, TimePoint now);
/// The link that this rank opened to the peer broke.
void writingBroke(Tables& tables, int peer, ErrorRecord gone, TimePoint now);
/// An operation was posted: its schedule (null: it has none yet) may need a rank that has left. `receives`: it is a receive, which may be
/// from any rank.
void posted(Tables& tables, const PreparedSchedule* schedule, bool receives, TimePoint now);
void tick(Tables& tables, TimePoint now);

// ---- questions
[[nodiscard]] TimePoint nextTick(const Tables& tables) noexcept;

} // namespace pycomm::leaving
