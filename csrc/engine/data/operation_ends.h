#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/data/messages.h"
#include "engine/data/outgoing.h"
#include "engine/data/refused_operations.h"
#include "engine/data/reporter.h"
#include "engine/data/tables.h"
#include "engine/data/transfers.h"
#include "engine/data/watched_operations.h"
#include "engine/links/peer_links.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// Ends operations of one group without success, in every part of the data plane that may hold them. It keeps the memory rule: when
/// operations end together, nothing touches their memory any more.
/// Thread: the lane's.
class OperationEnds {
 public:
  /// All of these outlive this.
  OperationEnds(
      Tables& tables,
      PeerLinks& links,
      Outgoing& outgoing,
      Transfers& transfers,
      Messages& messages,
      WatchedOperations& watched,
      const Reporter& reporter)
      : tables_(tables),
        identity_(tables.identity),
        links_(links),
        outgoing_(outgoing),
        transfers_(transfers),
        messages_(messages),
        watched_(watched),
        reporter_(reporter),
        refused_(tables.identity) {}

  /// The error of an operation that ends with others. The row is null if it is not entered.
  using Why = std::function<ErrorRecord(const Operation&, const OperationRow*)>;

  // ---- events
  /// An exception becomes the group's failure; `peer` is to blame, -1 for nobody.
  void thrown(int peer, const std::exception_ptr& exception) noexcept;
  /// The operation ends with the group's failure, which the exception that is being handled becomes; see RefusedOperations.
  void cannotBegin(const std::shared_ptr<Operation>& operation) noexcept;
  /// Of an operation that ends, and whose row is out of the table.
  void endInTables(OperationRow& row) noexcept;
  /// The one way in which operations end together.
  void endAll(const Why& why) noexcept;
  /// Ends operations that cannot begin if their deadline has passed.
  void endLate(TimePoint now) noexcept {
    refused_.endLate(now);
  }

  // ---- questions
  [[nodiscard]] TimePoint nextDeadline() const noexcept {
    return refused_.nextDeadline();
  }
  /// The group's cause as the error of one operation, with how far it has come.
  [[nodiscard]] ErrorRecord errorIn(const Operation& operation, const OperationRow* row, const ErrorRecord& cause)
      const;
  /// The same of the operation or message that was issued first; nothing if there is none.
  [[nodiscard]] std::optional<ErrorRecord> errorOfOldest(const ErrorRecord& cause) const;
  /// How many operations cannot begin.
  [[nodiscard]] size_t refused() const noexcept {
    return refused_.size();
  }
  /// An operation in which other ranks expect this one; null if there is none.
  [[nodiscard]] const Operation* unfinished() const noexcept;

 private:
  void stopTouchingMemory() noexcept;

  Tables& tables_;
  const GroupIdentity& identity_; ///< the tables'
  PeerLinks& links_;
  Outgoing& outgoing_;
  Transfers& transfers_;
  Messages& messages_;
  WatchedOperations& watched_;
  const Reporter& reporter_;
  RefusedOperations refused_;
};

} // namespace pycomm
