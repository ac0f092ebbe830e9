#pragma once

#include <cstddef>
#include <memory>
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

/// Reuses payload memory in classes of powers of two, so that a steady state allocates nothing and touches warm pages.
/// One thread: the lane's.
class StagingPool {
 public:
  /// Keeps at most `keep_nbytes` for reuse.
  explicit StagingPool(size_t keep_nbytes) : keep_nbytes_(keep_nbytes) {}

  /// Throws std::bad_alloc.
  [[nodiscard]] StagingBuffer take(size_t nbytes);

  /// Bytes asked for that have not been given back.
  [[nodiscard]] size_t takenNbytes() const noexcept {
    return taken_nbytes_;
  }

 private:
  friend class StagingBuffer;
  void giveBack(std::unique_ptr<std::byte[]> memory, size_t size_class) noexcept;

  const size_t keep_nbytes_;
  size_t kept_nbytes_ = 0;
  size_t taken_nbytes_ = 0;
  std::vector<std::vector<std::unique_ptr<std::byte[]>>> free_; ///< by class
};

} // namespace pycomm
