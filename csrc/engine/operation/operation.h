#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/buffer_view.h"
#include "base/deadline.h"
#include "base/error.h"
#include "engine/operation/codec_counters.h"
#include "engine/operation/descriptor.h"
#include "engine/operation/flight_log.h"
#include "engine/operation/issue_context.h"
#include "engine/operation/piece_flow.h"
#include "engine/operation/prepared_schedule.h"

namespace pycomm {

/// An operation that waits for long, or whose deadline has passed, is reported again so much later, and a receive that waits for long asks
/// again: a report may be lost for want of memory, and a question on its way.
inline constexpr std::chrono::milliseconds kSayAgain(kLongestSleepMs);

/// One collective or message on one rank, from the moment it is issued until it has ended. Shared by the caller that waits for it and the thread
/// that runs it, which ends it, once: the data loop's owner, or in shared memory the thread that holds HostPlane's run_mutex_.
class Operation {
 public:
  /// Of an operation in shared memory: see HostPlane.
  struct Shared {
    uint64_t ticket = 0; ///< 0: it is not one. Set once, before others have it
    int64_t bytes_total = 0;
    std::atomic<int64_t> bytes_done{0};
    std::atomic<bool> held{false}; ///< its input is not there yet (Group::Call::held)
  };

  struct Request {
    OperationId id;
    Descriptor descriptor;
    std::shared_ptr<const PreparedSchedule> schedule;
    ConstBufferView input;
    BufferView output;
    Deadline deadline = Deadline::never();
    /// What few operations have, so that one that only waits for its turn is small: a program may have a million sends under way.
    struct Extras {
      std::vector<ConstBufferView> input_parts; ///< instead of `input`: a buffer for each rank's part, in rank order
      std::vector<BufferView> output_parts; ///< instead of `output`
      double premul_factor = 1.0;
      BufferView residual; ///< see Group::Call
      bool input_encoded = false; ///< see Group::Call, as the next
      bool output_encoded = false;
      std::shared_ptr<PieceFlow> pieces; ///< see Group::Call::in_pieces; null: all input is there when it begins
      std::shared_ptr<CodecCounters> codec_counters; ///< where descriptor.codec is not None
      Shared shared; ///< see Operation::makeShared
    };
    /// To read: the defaults if there are none. To write: they are made.
    [[nodiscard]] const Extras& extras() const noexcept;
    [[nodiscard]] Extras& extras() {
      extras_ = extras_ ? std::move(extras_) : std::make_unique<Extras>();
      return *extras_;
    }
    // Point-to-point. Both sides have the descriptor of the send, so that they can be compared.
    bool receives = false;
    int peer = -1; ///< as asked; PointToPoint::kAnyRank for a receive from any rank

   private:
    friend class Operation;
    std::unique_ptr<Extras> extras_;
  };

  explicit Operation(Request request)
      : request_(std::move(request)), issued_at_(Clock::now()), identified_(request_.id.id != 0) {}

  /// Of a point-to-point operation `id`, `schedule` and two fields of `descriptor` (root, digest) are set by identify() on the data loop, when the
  /// sender is known: other threads look at them only once it is identified().
  [[nodiscard]] const Request& request() const noexcept {
    return request_;
  }
  [[nodiscard]] bool identified() const noexcept {
    return identified_.load(std::memory_order_acquire);
  }
  /// Data loop only, once: which message this is, of which sender.
  void identify(OperationId id, std::shared_ptr<const PreparedSchedule> schedule, int sender, uint32_t index);
  [[nodiscard]] TimePoint issuedAt() const noexcept {
    return issued_at_;
  }

  /// To write: is made if there is none, before others have the operation. To read: of another way, as if it had ticket 0.
  [[nodiscard]] Shared& makeShared() {
    return request_.extras().shared;
  }
  [[nodiscard]] Shared& shared() const noexcept;

  /// Its place in the flight log. Set once, before the data loop has it.
  void setMark(FlightLog::Mark mark) noexcept {
    mark_ = std::move(mark);
  }
  [[nodiscard]] const FlightLog::Mark& mark() const noexcept {
    return mark_;
  }

  /// "all_reduce", "recv"
  [[nodiscard]] const char* name() const noexcept;
  /// "all_reduce #12", "all_reduce issued in callback 1 of all_reduce #3 in group 2", "recv from any rank (tag 3)".
  [[nodiscard]] std::string label(const JobRanks& job = {}) const;

  [[nodiscard]] bool done() const noexcept {
    return done_.load(std::memory_order_acquire);
  }
  /// Waits until the operation has ended, or the deadline: true if it has ended.
  [[nodiscard]] bool wait(Deadline deadline) const;
  /// Why it failed; nothing if it succeeded. Call after done().
  [[nodiscard]] std::optional<ErrorRecord> error() const;

  /// Runs `listener` once when the operation ends: on the thread that calls finish(), or here and now if it has ended. It must be short and must not
  /// throw: it hands on to the callback pool. If it throws nevertheless, the others are run all the same.
  void onDone(std::function<void()> listener);

  /// By the thread that runs it, once. Nothing touches the buffers after this.
  void finish(std::optional<ErrorRecord> error) noexcept;

 private:
  /// What few pending operations have.
  struct Ending {
    std::vector<std::function<void()>> listeners;
    std::unique_ptr<const ErrorRecord> error;
  };
  /// Made when asked for.
  [[nodiscard]] Ending& ending() {
    ending_ = ending_ ? std::move(ending_) : std::make_unique<Ending>();
    return *ending_;
  }

  Request request_; ///< changed by identify() and makeShared() only
  const TimePoint issued_at_;
  FlightLog::Mark mark_;
  std::atomic<bool> identified_; ///< beside the other flags: that saves 16 bytes
  // Guarded by a mutex that operations share, see WaitingRoom in the source: one of its own with its condition is 88 bytes. Of an
  // operation that is done all is read without it: in a child of fork() nobody would release it.
  std::atomic<bool> done_{false}; ///< written last, with the mutex held; read without
  bool failed_without_record_ = false; ///< there was no memory for it
  std::unique_ptr<Ending> ending_;
};

} // namespace pycomm
