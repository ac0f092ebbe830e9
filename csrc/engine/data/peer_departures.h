#pragma once

#include "base/deadline.h"
#include "base/error.h"
#include "engine/data/messages.h"
#include "engine/data/reporter.h"
#include "engine/data/tables.h"
#include "engine/links/peer_links.h"
#include "engine/monitor/departures.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// Connects Departures, which decides what it means that a rank goes away, with the data plane: it tells Departures what links and
/// operations notice, answers its questions about them, and reports what it decides.
/// Thread: the lane's.
class PeerDepartures final : private Departures::Dealings {
 public:
  /// All of these outlive this.
  PeerDepartures(
      const GroupIdentity& identity,
      const PeerLinks& links,
      const Tables& tables,
      const Messages& messages,
      const Reporter& reporter)
      : identity_(identity),
        links_(links),
        tables_(tables),
        messages_(messages),
        reporter_(reporter),
        departures_(identity, *this) {}
  PeerDepartures(const PeerDepartures&) = delete; // departures_ asks this object
  PeerDepartures& operator=(const PeerDepartures&) = delete;

  // ---- events; see Departures
  void saidGoodbye(int peer);
  void readingEnded(int peer, const Error& error);
  void writingBroke(int peer, const Error& error);
  void posted(const PreparedSchedule* schedule, bool receives, TimePoint now);
  void tick(TimePoint now);

  // ---- questions
  [[nodiscard]] bool isAway(int peer) const noexcept {
    return departures_.isAway(peer);
  }
  [[nodiscard]] TimePoint nextTick() const noexcept {
    return departures_.nextTick();
  }

 private:
  // Departures::Dealings
  [[nodiscard]] Departures::Reading reading(int peer) const noexcept override;
  [[nodiscard]] const Operation* owing(int peer) const noexcept override;
  [[nodiscard]] const Operation* awaiting(int peer) const noexcept override;
  [[nodiscard]] const Operation* awaitingAnyone() const noexcept override;

  [[nodiscard]] ErrorRecord brokenLink(int peer, const Error& error) const;
  void report();

  const GroupIdentity& identity_;
  const PeerLinks& links_;
  const Tables& tables_;
  const Messages& messages_;
  const Reporter& reporter_;
  Departures departures_;
};

} // namespace pycomm
