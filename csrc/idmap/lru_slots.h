#pragma once

#include <cstdint>
#include <vector>

#include "third_party/tsl/robin_map.h"

namespace pycomm {

/// Up to N ids, each with a slot from 0 to N − 1, in the order in which they were used last.
///
/// The state lies in the caller's arrays, so that it can be saved and loaded: the id of each slot, kFree for none, and a number of
/// its last use, which grows with each use. All memory is allocated at the beginning: no call takes longer because the set has
/// grown.
/// Thread: one at a time.
class LruSlots {
 public:
  static constexpr int64_t kFree = -1;
  static constexpr int32_t kNone = -1;

  /// Both arrays have N elements and outlive this object. Throws Error(InvalidArgument) if they hold an id twice, or one that is
  /// negative and not kFree, or a last use that is negative or above 2^62.
  LruSlots(int64_t* ids, int64_t* last_uses, int32_t size);

  [[nodiscard]] int32_t find(int64_t id) const;
  /// Of an id that is not there; kNone if no slot is free. It is the one that was used last.
  int32_t insert(int64_t id);
  void use(int32_t slot);
  void erase(int32_t slot);
  /// The slot that has not been used for the longest; kNone if all are free.
  [[nodiscard]] int32_t oldest() const noexcept {
    return oldest_;
  }
  [[nodiscard]] int64_t lastUse(int32_t slot) const noexcept {
    return last_uses_[slot];
  }
  /// What the next use will have at the least.
  [[nodiscard]] int64_t now() const noexcept {
    return now_;
  }
  [[nodiscard]] int32_t used() const noexcept {
    return size_ - static_cast<int32_t>(free_.size());
  }

 private:
  void append(int32_t slot) noexcept;
  void unlink(int32_t slot) noexcept;

  int64_t* const ids_;
  int64_t* const last_uses_;
  const int32_t size_;
  int64_t now_ = 1;
  tsl::robin_map<int64_t, int32_t> slots_;
  std::vector<int32_t> free_; ///< the next one to be taken is the last
  std::vector<int32_t> older_, newer_; ///< a list by last use
  int32_t oldest_ = kNone;
  int32_t newest_ = kNone;
};

} // namespace pycomm
