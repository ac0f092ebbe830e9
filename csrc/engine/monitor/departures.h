#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/operation/group_identity.h"

namespace pycomm {

class Operation;
struct PreparedSchedule;

/// After a link breaks, how long the peer's goodbye may take on another link. A rank that leaves says goodbye on its bulk links, and 20
/// ms later on its control links. Other ranks pass either on.
inline constexpr std::chrono::milliseconds kGoodbyeWithin(40);

/// Which ranks have left the group, which links broke, and when either is a failure. Events in, actions out: no I/O and no clock of its
/// own, like Membership.
///
/// A rank that leaves in order says goodbye on each of its links, but these links are independent: a goodbye may arrive before bytes
/// that were sent earlier on another link, and the end of a link may arrive before the goodbye that explains it. So:
///   - Goodbye. Operations that still have to send to that rank fail at once (PeerLeft). Operations that wait for it fail when the link
///     that it opened has ended. If it has not opened that link yet, the link has 3 s to arrive.
///   - A broken link on which this rank writes. The goodbye has 40 ms to arrive on another link. After that the break is a failure
///     (PeerDead) if bytes still have to go out on the link. If this rank only waits for bytes, they come on the peer's own link,
///     which has 3 s. If nothing is due in either direction, the rank is lost: it fails only operations that need it later.
///   - The end of the link that the peer opened, without a goodbye, is a failure at once.
///   - If the peer had left, and its last bytes were changed on their way, the first operation that may need them fails with that.
/// Example, rank 0 of 2: the write to rank 1 fails at 0 ms. Rank 1's goodbye arrives on the control link at 3 ms: rank 1 has left, and
/// no operation needs it, so nothing fails. Without the goodbye, rank 0 reports rank 1 as dead at 40 ms.
///
/// Thread: the owner's; no locks.
class Departures {
 public:
  /// The state of the link that a peer opened to this rank.
  enum class Reading { NotOpened, Open, Ended };

  /// What this rank's operations still have to do with a peer. Asked only after that peer has left or a link to it has broken.
  class Dealings {
   public:
    virtual ~Dealings() = default;
    [[nodiscard]] virtual Reading reading(int peer) const noexcept = 0;
    /// The first operation that has still to send to `peer`; null if there is none.
    [[nodiscard]] virtual const Operation* owing(int peer) const noexcept = 0;
    /// The first operation that waits for frames or a message from `peer`; null if there is none.
    [[nodiscard]] virtual const Operation* awaiting(int peer) const noexcept = 0;
    /// A receive from any rank that has no message yet; null if there is none.
    [[nodiscard]] virtual const Operation* awaitingAnyone() const noexcept = 0;
  };

  struct Action {
    enum class Kind {
      Notice, ///< the group has failed
      Doubt, ///< the group has failed if this peer is still there: see Membership::doubted
    };
    Kind kind = Kind::Notice;
    ErrorRecord record;
  };

  /// `dealings` outlives this.
  Departures(GroupIdentity identity, const Dealings& dealings);

  // ---- events
  /// The peer's goodbye has arrived, on a bulk link or on its control link.
  void saidGoodbye(int peer, TimePoint now);
  /// The link that the peer opened has ended, or broke. `gone`: the error if no goodbye explains it.
  void readingEnded(int peer, ErrorRecord gone, TimePoint now);
  /// The link that this rank opened to the peer broke.
  void writingBroke(int peer, ErrorRecord gone, TimePoint now);
  /// An operation was posted: its schedule (null: it has none yet) may need a rank that has left. `receives`: it is a receive, which may be
  /// from any rank.
  void posted(const PreparedSchedule* schedule, bool receives, TimePoint now);
  void tick(TimePoint now);

  // ---- questions
  /// The peer said goodbye, or is lost.
  [[nodiscard]] bool isAway(int peer) const noexcept {
    return presence_[static_cast<size_t>(peer)] != Presence::Here;
  }
  [[nodiscard]] TimePoint nextTick() const noexcept;
  [[nodiscard]] std::vector<Action> takeActions() {
    return std::exchange(actions_, {});
  }

 private:
  /// Here -> Lost -> Left, or Here -> Left.
  enum class Presence {
    Here,
    Lost, ///< the link to it broke while nothing was due, and it said no goodbye
    Left, ///< it said goodbye
  };
  struct Suspicion {
    /// AwaitsGoodbye -> AwaitsLink, or AwaitsGoodbye -> Doubted; a suspicion may also begin as AwaitsLink.
    enum class State {
      AwaitsGoodbye, ///< a link broke: a goodbye may explain it
      AwaitsLink, ///< the link that the peer opened may be on its way
      Doubted, ///< nothing here needs the peer: only ranks with a control link to it know whether it is alive
    };
    State state;
    ErrorRecord record; ///< the failure if nothing explains it until then
    TimePoint due;
  };

  void check(int peer, TimePoint now);
  void checkAnyone(int left, TimePoint now);
  void decide(int peer, Suspicion suspicion, TimePoint now);
  void lose(int peer, const ErrorRecord& broke, TimePoint doubt_at);
  [[nodiscard]] const Operation* withoutSenders() const noexcept;
  void notice(ErrorRecord record);

  const GroupIdentity identity_;
  const Dealings& dealings_;
  std::vector<Presence> presence_; ///< by rank
  size_t away_ = 0; ///< ranks that are not Here
  std::unordered_map<int, ErrorRecord> lost_; ///< by rank, of those that are Lost: what broke
  std::map<int, ErrorRecord> changed_; ///< by rank, of those that have Left: bytes of it came changed
  std::map<int, Suspicion> suspicions_; ///< by rank
  std::vector<Action> actions_;
};

} // namespace pycomm
