#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/buffer_view.h"

namespace pycomm {

class StagingPool;

/// Memory for one frame's payload, given back to its pool when dropped.
class StagingBuffer {
 public:
  StagingBuffer() = default;
  StagingBuffer(StagingBuffer&& other) noexcept;
  StagingBuffer& operator=(StagingBuffer&& other) noexcept;
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;
  ~StagingBuffer() {
    release();
  }

  [[nodiscard]] BufferView view() const noexcept {
    return {memory_.get(), nbytes_};
  }
  [[nodiscard]] explicit operator bool() const noexcept {
    return memory_ != nullptr;
  }
  void release() noexcept;

 private:
  friend class StagingPool;
  StagingPool* pool_ = nullptr; ///< outlives its buffers: both belong to one data plane, which drops buffers first
  std::unique_ptr<std::byte[]> memory_;
  size_t nbytes_ = 0;
  size_t size_class_ = 0;
};

/// Payload memory that no frame needs now, in classes of powers of two, so that a steady state allocates nothing and touches warm
/// pages. One per event loop: how much is kept does not grow with the number of groups. Of the loop's current thread.
class StagingMemory {
 public:
  /// So much is released elsewhere if it is not kept: the kernel takes 0.2 ms for it here.
  static constexpr size_t kDiscardNbytes = 4 << 20;
  using Discard = std::function<void(std::shared_ptr<const void> memory)>;

  /// Keeps at most `keep_nbytes` for reuse. `discard` must not throw; null: all is released at once.
  explicit StagingMemory(size_t keep_nbytes, Discard discard = nullptr)
      : keep_nbytes_(keep_nbytes), discard_(std::move(discard)) {}

  /// Of 2^size_class bytes; if that is more than is ever kept, of `nbytes` in whole pages. Throws std::bad_alloc.
  [[nodiscard]] std::unique_ptr<std::byte[]> take(size_t size_class, size_t nbytes);
  void giveBack(std::unique_ptr<std::byte[]> memory, size_t size_class, size_t nbytes) noexcept;

  [[nodiscard]] size_t keptNbytes() const noexcept {
    return kept_nbytes_;
  }

 private:
  const size_t keep_nbytes_;
  const Discard discard_;
  size_t kept_nbytes_ = 0;
  std::vector<std::vector<std::unique_ptr<std::byte[]>>> free_; ///< by class
};

/// What one group has taken of its loop's payload memory. One thread: the loop's.
class StagingPool {
 public:
  /// `memory` outlives the pool.
  explicit StagingPool(StagingMemory& memory) : memory_(memory) {}

  /// Throws std::bad_alloc.
  [[nodiscard]] StagingBuffer take(size_t nbytes);

  /// Bytes asked for that have not been given back.
  [[nodiscard]] size_t takenNbytes() const noexcept {
    return taken_nbytes_;
  }

 private:
  friend class StagingBuffer;
  StagingMemory& memory_;
  size_t taken_nbytes_ = 0;
};

} // namespace pycomm
