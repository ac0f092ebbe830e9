#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/buffer_view.h"

namespace pycomm {

// A ring of bytes in memory that two processes share: one writes, the other reads. It begins zeroed. Both counters only rise; a byte's
// place is its number modulo the size.
//
// An end that is about to sleep says so and then looks once more. An end that has moved bytes looks whether the other sleeps, and wakes it.
// All four steps are sequentially consistent, so one of the two sees the other. How the other is woken is not the ring's business.
//
// Neither end trusts what the other has written: a counter that cannot be is Error(ProtocolViolation), and no byte outside the ring is
// ever touched.

struct RingWords {
  alignas(128) std::atomic<uint64_t> written; ///< the writer's
  alignas(128) std::atomic<uint64_t> taken; ///< the reader's
  /// 0: asleep, or about to be. Set to 0 by its end, to 1 by the end that wakes it. A reader begins asleep: the first byte wakes it.
  alignas(128) std::atomic<uint32_t> reader_awake;
  alignas(128) std::atomic<uint32_t> writer_awake;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

/// Where a ring lies.
struct RingMemory {
  std::byte* base = nullptr;
  size_t nbytes = 0; ///< of the bytes behind the words; a power of two

  /// The words take a page, so that the bytes begin on one.
  static constexpr size_t kWordsNbytes = 4096;
  [[nodiscard]] static constexpr size_t totalNbytes(size_t nbytes) noexcept {
    return kWordsNbytes + nbytes;
  }
  [[nodiscard]] RingWords& words() const noexcept {
    return *reinterpret_cast<RingWords*>(base);
  }
  [[nodiscard]] std::byte* bytes() const noexcept {
    return base + kWordsNbytes;
  }
};
static_assert(sizeof(RingWords) <= RingMemory::kWordsNbytes, "the words fit into their page");

/// The end that writes. One thread.
class RingWriter {
 public:
  explicit RingWriter(RingMemory memory) noexcept;

  /// Copies as much as fits. The reader sees it after publish().
  [[nodiscard]] size_t put(ConstBufferView bytes);
  /// Whether the reader has to be woken.
  [[nodiscard]] bool publish();
  [[nodiscard]] size_t unpublished() const noexcept {
    return static_cast<size_t>(written_ - published_);
  }

  /// There is enough room to go on with: a part of the ring, so that a writer does not wake for every few bytes.
  [[nodiscard]] bool hasRoom() const noexcept;
  /// From now on the reader wakes this end when there is. False if there is already.
  [[nodiscard]] bool sleep() noexcept;
  /// No longer; true if the reader has done it.
  [[nodiscard]] bool wake() noexcept;

 private:
  RingMemory memory_;
  uint64_t written_ = 0;
  uint64_t published_ = 0;
  uint64_t taken_ = 0; ///< as last seen
  bool asleep_ = false;
};

/// The end that reads. One thread.
class RingReader {
 public:
  explicit RingReader(RingMemory memory) noexcept : memory_(memory) {}

  /// Copies as much as there is, and no more than a part of the ring. The writer sees its room after publish().
  [[nodiscard]] size_t take(BufferView into);
  /// Whether the writer has to be woken.
  [[nodiscard]] bool publish();

  [[nodiscard]] bool hasBytes() const noexcept;
  /// From now on the writer wakes this end when there are some. False if there are already.
  [[nodiscard]] bool sleep() noexcept;
  /// No longer; true if the writer has done it.
  [[nodiscard]] bool wake() noexcept;
  /// Asleep for good: a writer to an end that has gone tries to wake it, and learns of it.
  void leave() noexcept {
    memory_.words().reader_awake.store(0, std::memory_order_seq_cst);
  }

 private:
  RingMemory memory_;
  uint64_t taken_ = 0;
  uint64_t written_ = 0; ///< as last seen
  bool asleep_ = true;
};

} // namespace pycomm
