#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "engine/data/local_steps.h"
#include "engine/data/tables.h"
#include "engine/links/channel.h"
#include "engine/loop/staging_pool.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// Runs one operation's schedule: the executor. It decides which step runs when; LocalSteps has memory and arithmetic, and links, time and
/// failures are its owner's.
///
/// A step runs once its dependencies have ended and, if it receives, its frame has arrived. Frames of an edge arrive and leave in
/// listed order, so the counts of each edge (EdgeRow) say which step a frame belongs to. Example, rank 1 of a 3-rank ring, one segment per chunk:
///   frame from 0 arrives -> RecvReduceSend: staging = staging op own chunk, goes on to 2 -> frame taken by the kernel -> ended.
/// Steps that only send run at once, and so do those whose frame has just arrived: a link brings a bounded number of bytes per turn. All
/// other steps are work, which their owner calls for in slices. So a large copy holds up neither frames nor other operations.
/// To begin is work, too, as there may be millions of steps: no step runs before begin() has come to it.
/// One thread: the data loop's.
class Transfer {
 public:
  /// Queues a frame to a peer.
  using SendFrame = std::function<void(int peer, OutFrame&& frame)>;
  /// The transfers that have work, in the order in which they get their turn.
  using Working = std::deque<Transfer*>;

  /// Of an operation that is entered. It adds itself to `working` when it has work. The owner takes it out for work(), and if it ends
  /// before. All that is given here outlives this.
  Transfer(Tables& tables, OperationRow& row, StagingPool& staging, const SendFrame& send_frame, Working& working);

  /// Sends what needs nothing from anybody, of the first steps.
  void start();
  /// Begins more steps; else copies and computes a slice of the step that has waited longest, of about so many bytes read and written.
  /// Returns how many, or what takes as long.
  size_t work(size_t nbytes);

  /// Throws Error unless this data frame is the next one due from `peer` (ProtocolViolation) and of the size of its part
  /// (CollectiveMismatch).
  void expect(int peer, const FrameHeader& header) const;
  /// The same, and says where its payload goes.
  [[nodiscard]] Sink place(int peer, const FrameHeader& header);
  /// That payload is complete. `sink.unexpected`: not just now, and others with it.
  void arrived(int peer, const FrameHeader& header, Sink sink);
  /// The kernel has taken the frame of this step.
  void sent(uint32_t step);
  /// More of the input has come (Operation::Request::pieces): there may be work.
  void inputArrived() {
    list();
  }
  /// The peer may have room now.
  void roomCame(int peer);

  [[nodiscard]] bool complete() const noexcept {
    return steps_left_ == 0 && inputComplete();
  }
  [[nodiscard]] bool inputComplete() const noexcept {
    return pieces_ == nullptr || pieces_->allArrived();
  }
  [[nodiscard]] OperationRow& row() const noexcept {
    return row_;
  }
  [[nodiscard]] int64_t bytesArrived() const noexcept {
    return bytes_arrived_;
  }
  [[nodiscard]] int64_t bytesExpected() const noexcept;

 private:
  struct StepState {
    uint32_t waits_for =
        0; ///< so many dependencies that have not ended; and one thing more until begin() has come to it
    bool arrived = false;
    bool sendable = false;
    bool eager = false; ///< its frame came eagerly: counts against the pool until consumed
  };
  static constexpr size_t kPageSteps = 1024; ///< whose states are made together, when the first of them is needed

  [[nodiscard]] uint32_t dueStep(int peer, const FrameHeader& header) const;
  [[nodiscard]] ErrorRecord refused(ErrorCode code, int peer, std::string summary, std::string hint) const;
  [[nodiscard]] StepState& state(uint32_t step);
  [[nodiscard]] BufferView staged(uint32_t step) const noexcept;
  [[nodiscard]] ConstBufferView outgoing(uint32_t step) const;
  /// Whether the next step may begin: its input is there.
  [[nodiscard]] bool mayBegin() const noexcept;
  /// The next steps, so many at the most.
  void begin(size_t steps);
  [[nodiscard]] size_t compute(size_t nbytes);
  /// Adds this to `working` if it has work.
  void list();
  /// One of the things that the step waits for is over.
  void release(uint32_t step);
  void becomeReady(uint32_t step);
  void runReady();
  void execute(uint32_t step);
  void computed(uint32_t step);
  void ended(uint32_t step);
  void consumed(uint32_t step);
  void sendFramesOf(size_t edge);

  Tables& tables_;
  OperationRow& row_; ///< holds this, and how far its edges have come
  const PreparedSchedule& prepared_; ///< held by the operation's request
  StagingPool& staging_;
  const SendFrame& send_frame_;
  PieceFlow* const pieces_; ///< of the operation's request; null: all input was there from the start
  const LocalSteps local_;
  size_t begun_ = 0; ///< steps, in the order in which their input comes
  std::vector<std::unique_ptr<StepState[]>> states_; ///< by step: pages of kPageSteps
  std::map<uint32_t, StagingBuffer> staged_; ///< by step: what arrived, or the partial result that goes on
  std::deque<uint32_t> ready_; ///< to run at once, in the order in which they became ready
  std::deque<uint32_t> work_; ///< the same of those that wait for work()
  size_t worked_ = 0; ///< values of the first of these that are done
  Working& working_; ///< the owner's
  bool listed_ = false; ///< it has this transfer
  size_t steps_left_;
  int64_t bytes_arrived_ = 0;
};

} // namespace pycomm
