#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/operation/descriptor.h"
#include "engine/operation/group_title.h"
#include "engine/operation/issue_context.h"

namespace pycomm {

enum class OperationState : uint8_t { Queued = 1, Running = 2, Done = 3, Failed = 4 };
[[nodiscard]] const char* operationStateName(OperationState state) noexcept; // "queued"

/// What a group goes through, in this order; a group may fail in any of them.
enum class GroupPhase : uint8_t { Rendezvous = 0, Connect = 1, Ready = 2, Failed = 3, Closed = 4 };
inline constexpr size_t kGroupPhases = 5;
[[nodiscard]] const char* groupPhaseName(GroupPhase phase) noexcept; // "rendezvous"

/// The last operations of one group on one rank, in memory: a ring of fixed slots.
///
/// It is written all the time and read almost never, so writing takes no lock, allocates nothing, and asks for the time only where
/// nobody else has: an operation claims a slot when it is issued (any thread), and the data loop adds to it while it runs. All fields
/// are atomics, written with release and read with acquire, so a reader beside them may see an operation between two states, never a torn number. A slot is found again
/// by its ticket, which is one word with the state: a late writer whose slot has been given to a newer operation does not change its
/// state. Its other numbers may be of both for that moment.
/// Operations under way keep their slots as long as ended ones can be overwritten instead: the one that hangs is what is looked for.
class FlightLog {
 public:
  struct Subject {
    std::string group;
    int rank = 0;
    int size = 1;
    JobRanks job;
    std::shared_ptr<const GroupTitle> title; ///< the group's identity has it, too; null: it never has one
    size_t slots = 0; ///< 0: nothing is recorded but phases and the failure
    std::string dump_prefix; ///< where a dump goes when the group fails: PREFIX<rank in the job>.json; empty: nowhere
    [[nodiscard]] int jobRank() const noexcept {
      return job.of(rank);
    }
  };

  /// One operation as a reader sees it. Times are steady-clock nanoseconds, 0 where it has not come to that.
  struct Entry {
    uint64_t ticket = 0; ///< counts what was issued, in order; numbers may be missing
    OperationId id;
    Descriptor descriptor;
    OperationState state = OperationState::Queued;
    ErrorCode code = ErrorCode::Ok;
    int blamed = -1; ///< the rank that the error names
    int thread = 0; ///< the kernel's number of the thread that issued it
    int64_t issued_ns = 0;
    int64_t started_ns = 0; ///< the data loop took it up
    int64_t first_byte_ns = 0; ///< the first payload for it arrived
    int64_t ended_ns = 0;
    int64_t bytes_done = 0; ///< received by this rank
    int64_t bytes_total = 0;
  };

 private:
  struct alignas(64) Slot {
    std::atomic<uint64_t> life; ///< ticket and state; 0: empty
    std::atomic<uint64_t> id;
    std::atomic<int64_t> sequence;
    std::atomic<int64_t> numel;
    std::atomic<uint64_t> kinds; ///< kind, dtype, reduce op, codec, algorithm
    std::atomic<uint64_t> root_and_tag;
    std::atomic<uint64_t> digest_and_thread;
    std::atomic<uint64_t> outcome; ///< of a failed one: code, blamed rank
    std::atomic<int64_t> issued_ns;
    std::atomic<int64_t> started_ns;
    std::atomic<int64_t> first_byte_ns;
    std::atomic<int64_t> ended_ns;
    std::atomic<int64_t> bytes_done;
    std::atomic<int64_t> bytes_total;
  };
  static_assert(sizeof(Slot) == 128, "two cache lines an operation");

 public:
  /// An operation's place in the log. Writing through an empty one does nothing. Copies are one operation's, too.
  class Mark {
   public:
    Mark() = default;
    /// A receive from any rank knows its sender.
    void from(int sender) const noexcept;
    /// The data loop has taken the operation up and will receive so many bytes for it.
    void running(TimePoint now, int64_t bytes_total) const noexcept;
    /// A frame of it arrives.
    void arriving(TimePoint now) const noexcept;
    /// So many bytes in all have arrived.
    void received(int64_t bytes_done) const noexcept;
    /// Asks for the time, and for `code` and the rank to blame if it failed.
    void ended(const std::optional<ErrorRecord>& error) const noexcept;
    /// Where it is written; null for an empty one.
    [[nodiscard]] const void* address() const noexcept {
      return slot_.get();
    }

   private:
    friend class FlightLog;
    Mark(std::shared_ptr<Slot> slot, uint64_t ticket) : slot_(std::move(slot)), ticket_(ticket) {}
    [[nodiscard]] bool owns() const noexcept;
    /// Gives the slot this state if it is still this operation's.
    void become(OperationState state) const noexcept;
    std::shared_ptr<Slot> slot_; ///< keeps the whole log, whose it is
    uint64_t ticket_ = 0;
  };

  [[nodiscard]] static std::shared_ptr<FlightLog> open(Subject subject);

  /// Any thread.
  [[nodiscard]] static Mark issued(
      const std::shared_ptr<FlightLog>& log,
      const OperationId& id,
      const Descriptor& descriptor,
      TimePoint now) noexcept;

  /// Now. The first time counts.
  void reached(GroupPhase phase) noexcept;
  /// Notes a failure before anybody can see it. A later record replaces it, until failed().
  void failing(const ErrorRecord& so_far);
  /// The first failure is kept.
  void failed(const ErrorRecord& record);
  /// Records the hosts of all ranks after the rendezvous. `run` tells this group from one of the same name in another run.
  void met(std::vector<std::string> hosts, uint64_t run);

  [[nodiscard]] const Subject& subject() const noexcept {
    return subject_;
  }
  [[nodiscard]] bool closed() const noexcept {
    return phase_ns_[static_cast<size_t>(GroupPhase::Closed)].load(std::memory_order_relaxed) != 0;
  }

  /// Steady-clock nanoseconds; 0: not reached.
  [[nodiscard]] int64_t reachedNs(GroupPhase phase) const noexcept {
    return phase_ns_[static_cast<size_t>(phase)].load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::optional<ErrorRecord> failure() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

  struct Snapshot {
    std::vector<Entry> entries; ///< oldest first
    bool complete = true; ///< nothing has been forgotten since the group was made
    std::array<int64_t, kGroupPhases> phase_ns{}; ///< by GroupPhase; 0: not reached
    std::vector<std::string> hosts;
    uint64_t run = 0;
    std::string title;
    std::optional<ErrorRecord> failure;
  };
  /// Any thread, beside writers.
  [[nodiscard]] Snapshot read() const;
  /// The oldest operations that have not ended, the newest of all, and the last that have ended; entries' room is bounded by these
  /// numbers, and the time by one look at each slot.
  [[nodiscard]] Snapshot readBrief(size_t pending, size_t ended) const;

 private:
  struct Free {
    void operator()(void* memory) const noexcept {
      std::free(memory);
    }
  };
  [[nodiscard]] static Slot* aligned(void* memory) noexcept;

  explicit FlightLog(Subject subject);
  [[nodiscard]] static bool readSlot(const Slot& slot, Entry& entry) noexcept;
  void readRest(Snapshot& snapshot) const;

  const Subject subject_;
  // From calloc: pages that no operation has used yet cost nothing, and a program may have hundreds of groups. It aligns to 16 bytes
  // only, so there is room for one slot more than there are. Zero bytes are empty slots; the atomics are lock-free words without a
  // constructor of their own.
  std::unique_ptr<void, Free> memory_;
  Slot* const slots_; ///< in memory_; null without it
  size_t slot_count_;
  std::atomic<uint64_t> next_{0};
  std::array<std::atomic<int64_t>, kGroupPhases> phase_ns_{};
  mutable std::mutex mutex_; ///< guards all below
  std::vector<std::string> hosts_;
  uint64_t run_ = 0;
  std::optional<ErrorRecord> failure_;
  bool failure_is_final_ = false;
};

} // namespace pycomm
