#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/operation/operation.h"

namespace pycomm {

/// What callers post to the HostPlane, until the thread that runs operations takes it. Gives each operation its ticket: 1, 2, 3, …
///
/// Thread: any. `Operation` is never touched after close() has returned it.
class HostInbox {
 public:
  /// Takes what `make` returns, and puts it into `made`. `make` runs with the lock held, so that the ids that it takes and the tickets have
  /// one order. False after close(): then `made` was not taken. If it throws, nothing was posted, and no ticket is taken.
  /// The others may be null. They too run with the lock held, and never after close(): `accept` before the operation is taken, `failed` if
  /// `make` or something later throws.
  bool post(
      const std::function<std::shared_ptr<Operation>()>& make,
      std::shared_ptr<Operation>& made,
      const std::function<void(Operation&)>& accept = nullptr,
      const std::function<void()>& failed = nullptr);
  /// Whether take() would find something. Sequentially consistent: see HostBell.
  [[nodiscard]] bool arrived() const noexcept {
    return arrived_.load(std::memory_order_seq_cst);
  }
  /// Swaps `into`, which is empty, with what was posted, in the order of the tickets.
  void take(std::vector<std::shared_ptr<Operation>>& into);
  /// Nothing is posted any more. Returns what nobody took. Takes no memory.
  std::vector<std::shared_ptr<Operation>> close() noexcept;

  /// One that was posted has ended, taken or not.
  void ended() noexcept {
    pending_.fetch_sub(1, std::memory_order_seq_cst);
  }
  [[nodiscard]] bool allEnded() const noexcept {
    return pending() == 0;
  }
  [[nodiscard]] uint64_t pending() const noexcept {
    return pending_.load(std::memory_order_seq_cst);
  }

  /// The last 64 that were posted, oldest first, whether or not they have ended.
  [[nodiscard]] std::vector<std::shared_ptr<Operation>> recent() const;

 private:
  void put(const std::shared_ptr<Operation>& made, const std::function<void(Operation&)>& accept);

  std::atomic<bool> arrived_{false};
  std::atomic<uint64_t> pending_{0}; ///< posted and not ended

  mutable std::mutex mutex_; ///< guards the rest
  std::vector<std::shared_ptr<Operation>> posted_;
  uint64_t last_ticket_ = 0;
  bool closed_ = false;
  std::array<std::shared_ptr<Operation>, 64> recent_;
  uint64_t recent_count_ = 0;
};

} // namespace pycomm
