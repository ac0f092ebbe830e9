#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/buffer_view.h"

namespace pycomm {

// A ring of bytes in memory that two processes share: one writes, the other reads. It begins zeroed. Both counters only
// rise; a byte's place is its number modulo the size.
//
// An end that is about to sleep sets its flag and then checks the counters once more. An end that has moved bytes
// checks the other's flag, and wakes it if it sleeps. All four steps are sequentially consistent, so at least one of
// the two sees the other's step. The caller implements the wake-up itself.
//
// Neither end trusts the other's counter: an impossible value raises Error(ProtocolViolation), and no byte outside the
// ring is ever touched.

struct RingWords {
  alignas(128) std::atomic<uint64_t> written; ///< only the writer writes it
  alignas(128) std::atomic<uint64_t> taken; ///< only the reader writes it
  /// 0: asleep, or about to be. An end sets its own flag to 0; the end that wakes it sets it to 1. A reader begins
  /// asleep, so the first byte wakes it.
  alignas(128) std::atomic<uint32_t> reader_awake;
  alignas(128) std::atomic<uint32_t> writer_awake;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

/// The memory of a ring.
struct RingMemory {
  std::byte* base = nullptr;
  size_t nbytes = 0; ///< size of the byte area after the words; a power of two

  /// The words take a whole page, so that the byte area is page-aligned.
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

/// The writing end. One thread.
class RingWriter {
 public:
  explicit RingWriter(RingMemory memory) noexcept;

  /// Copies as many bytes as fit. The reader sees them after publish().
  [[nodiscard]] size_t put(ConstBufferView bytes);
  /// Returns true if the caller must wake the reader.
  [[nodiscard]] bool publish();
  [[nodiscard]] size_t unpublished() const noexcept {
    return static_cast<size_t>(written_ - published_);
  }

  /// True if enough room is free: a part of the ring, so that a writer does not wake for every few bytes.
  [[nodiscard]] bool hasRoom() const noexcept;
  /// Announces that the writer sleeps: the reader wakes it once hasRoom(). Returns false if there is room already.
  [[nodiscard]] bool sleep() noexcept;
  /// Withdraws the announcement; returns true if the reader has withdrawn it already.
  [[nodiscard]] bool wake() noexcept;

 private:
  RingMemory memory_;
  uint64_t written_ = 0;
  uint64_t published_ = 0;
  uint64_t taken_ = 0; ///< the reader's counter as last read
  bool asleep_ = false;
};

/// The reading end. One thread.
class RingReader {
 public:
  explicit RingReader(RingMemory memory) noexcept : memory_(memory) {}

  /// Copies the available bytes, but at most a part of the ring. The writer sees the freed room after publish().
  [[nodiscard]] size_t take(BufferView into);
  /// Returns true if the caller must wake the writer.
  [[nodiscard]] bool publish();

  [[nodiscard]] bool hasBytes() const noexcept;
  /// Announces that the reader sleeps: the writer wakes it once hasBytes(). Returns false if there are bytes already.
  [[nodiscard]] bool sleep() noexcept;
  /// Withdraws the announcement; returns true if the writer has withdrawn it already.
  [[nodiscard]] bool wake() noexcept;
  /// Marks the reader as asleep for good: a writer then tries to wake it, and so finds that it has gone.
  void leave() noexcept {
    memory_.words().reader_awake.store(0, std::memory_order_seq_cst);
  }

 private:
  RingMemory memory_;
  uint64_t taken_ = 0;
  uint64_t written_ = 0; ///< the writer's counter as last read
  bool asleep_ = true;
};

} // namespace pycomm
