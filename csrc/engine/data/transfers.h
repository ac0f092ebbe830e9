#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/data/protocol.h"
#include "engine/data/transfer.h"
#include "engine/links/channel.h"
#include "engine/links/peer_links.h"
#include "engine/loop/loop.h"
#include "engine/loop/staging_pool.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// The operations of one group that are under way on this rank, and unexpected frames: those that came before their operation was posted.
///
/// An operation: add() -> takeComplete() or endAll(). An unexpected frame: placeUnexpected() when its header is here, arrived() when its
/// payload is, then replayUnexpected() or endAll().
/// Thread: the lane's.
class Transfers {
 public:
  /// All of these outlive this.
  Transfers(
      const GroupIdentity& identity,
      Protocol& protocol,
      StagingPool& staging,
      Loop& lane,
      Transfer::SendFrame send_frame);

  // ---- events
  /// The operation is under way from now on, and the protocol knows it. If this throws, neither has it. The owner then calls
  /// Transfer::start() and replayUnexpected().
  [[nodiscard]] Transfer& add(const std::shared_ptr<Operation>& operation, TimePoint now);
  /// Gives the transfer its unexpected frames.
  void replayUnexpected(Transfer& transfer);
  /// Says where the payload of a data frame goes. Its operation is under way.
  [[nodiscard]] Sink place(int peer, const FrameHeader& header, TimePoint now);
  /// The same of an unexpected one.
  [[nodiscard]] Sink placeUnexpected(const FrameHeader& header);
  /// The payload of a data frame is complete: whether its operation is under way.
  [[nodiscard]] bool arrived(int peer, const FrameHeader& header, Sink&& sink);
  /// The frame has left: whether it is one that its operation waits for.
  [[nodiscard]] bool sent(const OutFrame& frame);
  /// There may be room for its frames at that peer.
  void sendFrames(uint64_t op_id, int peer);
  /// More of its input is here: whether the operation is under way.
  [[nodiscard]] bool inputArrived(uint64_t op_id);
  /// A slice of one operation's work; each gets its turn. Requires hasWork().
  struct Worked {
    uint64_t op_id = 0;
    size_t nbytes = 0;
  };
  Worked work(size_t nbytes);
  /// Takes the operation if all its steps have ended; else null.
  [[nodiscard]] std::unique_ptr<Transfer> takeComplete(uint64_t op_id);
  /// Takes all operations, for `end`, and drops all unexpected frames.
  void endAll(const std::function<void(const Transfer&)>& end) noexcept;

  // ---- questions
  [[nodiscard]] bool runs(uint64_t op_id) const noexcept {
    return transfers_.count(op_id) != 0;
  }
  [[nodiscard]] bool hasWork() const noexcept {
    return !working_.empty();
  }
  [[nodiscard]] bool has(const Operation& operation) const noexcept;
  [[nodiscard]] size_t size() const noexcept {
    return transfers_.size();
  }
  [[nodiscard]] size_t unexpectedFrames() const noexcept;
  /// The one that was issued first; null if there is none.
  [[nodiscard]] const Transfer* oldest() const noexcept;
  /// The one with the lowest id; null if there is none, as for the next two.
  [[nodiscard]] const Operation* first() const noexcept;
  /// The first that has still to send to `peer`.
  [[nodiscard]] const Operation* owing(int peer) const noexcept;
  /// The first that waits for frames from `peer`.
  [[nodiscard]] const Operation* awaiting(int peer) const noexcept;
  /// Adds the peers from which small operations wait for frames. False if so many operations are under way that it is cheaper to ask the
  /// kernel.
  [[nodiscard]] bool addDuePeers(std::vector<int>& peers) const;
  /// The error of an operation whose deadline has passed. Nothing if it is not under way.
  [[nodiscard]] std::optional<ErrorRecord> overdue(uint64_t op_id) const;

 private:
  struct UnexpectedFrame {
    int peer;
    FrameHeader header;
    StagingBuffer staging;
  };

  const GroupIdentity& identity_;
  Protocol& protocol_;
  StagingPool& staging_;
  Loop& lane_;
  const Transfer::SendFrame send_frame_;
  Transfer::Working working_; ///< of transfers_
  std::map<uint64_t, std::unique_ptr<Transfer>> transfers_; ///< oldest first: its deadline names who has not entered
  std::unordered_map<uint64_t, std::vector<UnexpectedFrame>> unexpected_; ///< by operation
};

} // namespace pycomm
