#pragma once

#include <cstddef>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/data/tables.h"
#include "engine/data/transfer.h"
#include "engine/links/channel.h"
#include "engine/loop/loop.h"
#include "engine/loop/staging_pool.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// Runs the operations of one group that this rank's event loop runs: those whose row has a Transfer.
///
/// An unexpected frame, which came before its operation was posted: placeUnexpected() when its header is here, arrived() when its payload
/// is, then replayUnexpected().
/// Thread: the data loop's.
class Transfers {
 public:
  /// All of these outlive this.
  Transfers(Tables& tables, StagingPool& staging, Loop& data_loop, Transfer::SendFrame send_frame)
      : tables_(tables), staging_(staging), data_loop_(data_loop), send_frame_(std::move(send_frame)) {}

  // ---- events
  /// The operation is under way from now on: its row. If this throws, it has none. The owner then calls Transfer::start() and
  /// replayUnexpected().
  [[nodiscard]] OperationRow& add(const std::shared_ptr<Operation>& operation, TimePoint now);
  /// Gives the operation its unexpected frames.
  void replayUnexpected(OperationRow& row);
  /// Says where the payload of a data frame goes. Its operation is under way.
  [[nodiscard]] Sink place(OperationRow& row, int peer, const FrameHeader& header, TimePoint now);
  /// The same of an unexpected one.
  [[nodiscard]] Sink placeUnexpected(const FrameHeader& header);
  /// The payload of a data frame is complete; `row` is null if its operation is not entered here. Whether it is under way.
  [[nodiscard]] bool arrived(OperationRow* row, int peer, const FrameHeader& header, Sink&& sink);
  /// A slice of one operation's work; each gets its turn. Requires hasWork().
  struct Worked {
    OperationRow* row = nullptr;
    size_t nbytes = 0;
  };
  Worked work(size_t nbytes);
  /// Whether all steps of the operation have ended: then its row can go.
  [[nodiscard]] static bool isComplete(const OperationRow& row);
  /// An operation that was added has ended.
  void ended() noexcept {
    data_loop_.addBusy(-1);
  }
  /// No operation has work any more.
  void dropWork() noexcept {
    working_.clear();
  }

  // ---- questions
  [[nodiscard]] bool hasWork() const noexcept {
    return !working_.empty();
  }
  /// Adds the peers from which small operations wait for frames. False if so many operations are under way that it is cheaper to ask the
  /// kernel.
  [[nodiscard]] bool addDuePeers(std::vector<int>& peers) const;
  /// The error of an operation whose deadline has passed.
  [[nodiscard]] ErrorRecord overdue(const OperationRow& row) const;

 private:
  Tables& tables_;
  StagingPool& staging_;
  Loop& data_loop_;
  const Transfer::SendFrame send_frame_;
  Transfer::Working working_; ///< of the rows
};

} // namespace pycomm
