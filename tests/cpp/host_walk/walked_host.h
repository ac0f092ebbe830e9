#pragma once

// csrc/engine/host as it is, compiled once more, under other names: with words (HostWord) whose loads and stores a Walk puts in order, and with
// slots and stages of a few elements. Each fault point is a pause before what it stands at: that is where ranks read and write memory that others
// write and read.

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/fault_point.h"
#include "engine/host/host_word.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/operation.h"
#include "transport/frame_header.h"
#include "transport/memory/futex.h"
#include "transport/memory/shared_arena.h"
#include "transport/memory/shared_heap.h"

namespace pycomm {
namespace testing {

/// An access that asks for another order than sequential consistency, which is all that a Walk has.
void weaker(const void* word, bool loads);
void beforeLoad(const void* word);
void loads(const void* word);
void afterLoad(const void* word, uint64_t value);
void beforeStore(const void* word, uint64_t is, uint64_t will_be);
/// Others compare it with a bound, and it only rises.
[[nodiscard]] bool isCounter(const void* word);
void afterStore(const void* word);
void beforeBytes(const char* site);

} // namespace testing

template <typename T>
class WalkedWord;

namespace testing {

/// The rank needs another one's counter to be so high, and it is not.
void lacks(const WalkedWord<uint64_t>& word, uint64_t bound);

} // namespace testing

/// What a load returns: the word is read when it is used, at once, and a comparison with a counter's bound sees no more than its outcome.
template <typename T>
class WalkedLoad {
 public:
  explicit WalkedLoad(const WalkedWord<T>& word) : word_(word) {}
  operator T() const noexcept { // NOLINT(google-explicit-constructor): as what atomics load
    testing::beforeLoad(&word_);
    const T value = word_.value_;
    testing::afterLoad(&word_, value);
    return value;
  }
  [[nodiscard]] bool operator<(T bound) const noexcept {
    if (!testing::isCounter(&word_)) {
      return static_cast<T>(*this) < bound;
    }
    if (word_.value_ < bound) {
      testing::beforeLoad(&word_);
    } else {
      testing::loads(&word_); // at any time from now on it finds the same, so it need not wait
    }
    const bool less = word_.value_ < bound;
    testing::afterLoad(&word_, static_cast<uint64_t>(less));
    if (less) {
      testing::lacks(word_, bound);
    }
    return less;
  }

 private:
  const WalkedWord<T>& word_;
};

template <typename T>
class WalkedWord {
 public:
  WalkedLoad<T> load(std::memory_order order) const noexcept {
    check(order, true);
    return WalkedLoad<T>(*this);
  }
  void store(T value, std::memory_order order) noexcept {
    check(order, false);
    testing::beforeStore(this, value_, value);
    value_ = value;
    testing::afterStore(this);
  }
  /// For the scene itself.
  [[nodiscard]] T peek() const noexcept {
    return value_;
  }
  T fetch_add(T by, std::memory_order order) noexcept {
    check(order, false);
    testing::beforeStore(this, value_, value_ + by);
    const T before = value_;
    value_ += by;
    testing::afterStore(this);
    return before;
  }

 private:
  friend class WalkedLoad<T>;
  void check(std::memory_order order, bool loads) const noexcept {
    if (order != std::memory_order_seq_cst) {
      testing::weaker(this, loads);
    }
  }

  T value_;
};

void futexWait(const WalkedWord<uint32_t>& word, uint32_t seen, int64_t timeout_us) noexcept;
void futexWake(const WalkedWord<uint32_t>& word) noexcept;

inline constexpr uint64_t kWalkedSlots = 2;
void walkedPause() noexcept;
inline constexpr int kWalkedPauses = 1000; // more than others write: a rank that goes on ends its step sooner or later
inline void walkedCommit(const SharedArena& /*arena*/, size_t /*begin*/, size_t /*nbytes*/) {
} // the scene has committed all
[[nodiscard]] bool walkedDetach(SharedHeap& heap, BufferView part) noexcept;
inline constexpr size_t kWalkedInlineNbytes = 64;
inline constexpr size_t kWalkedStageNbytes = 96;
inline constexpr uint64_t kWalkedStages = 2;

} // namespace pycomm

#define HostWord WalkedWord
#define hostPause walkedPause
#define hostCommit walkedCommit
#define hostDetach walkedDetach
#define kHostPauses kWalkedPauses
#define kHostSlots kWalkedSlots
#define kHostInlineNbytes kWalkedInlineNbytes
#define kHostStageNbytes kWalkedStageNbytes
#define kHostStages kWalkedStages

#define HostBell WalkedBell
#define HostHeaps WalkedHeaps
#define HostMemory WalkedMemory
#define HostPlane WalkedPlane
#define HostProgress WalkedProgress
#define HostSlot WalkedSlot
#define HostTransfer WalkedTransfer
#define HostView WalkedView
#define HostWorker WalkedWorker

#undef PYCOMM_FAULT_POINT
#undef PYCOMM_FAULT
#define PYCOMM_FAULT_POINT(site) ::pycomm::testing::beforeBytes(site)
#define PYCOMM_FAULT(site) ::pycomm::testing::beforeBytes(site)

#define private public // what a rank remembers is a part of the state
#include "engine/host/host_plane.h"
#undef private
