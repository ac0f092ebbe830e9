#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "engine/operation/descriptor.h"
#include "engine/operation/issue_context.h"
#include "transport/frame_header.h"

namespace pycomm {

/// What this rank has entered so far: the last operation, which it names to ranks that ask, and the last 256 that have ended.
///
/// Of older ones it knows that they have ended: of counted ones by their order, of derived ones by their ids, the last 32,768. That is more
/// than a peer's pool takes frames for and may have credit for, so more than this rank can be ahead of a peer that receives from it.
/// Thread: the RollCall's owner's.
class EntryHistory {
 public:
  static constexpr size_t kRecent = 256;
  static constexpr size_t kForgotten = 32768;

  void entered(const OperationId& id, const Descriptor& descriptor);
  void ended(uint64_t op_id, const Descriptor& descriptor);
  /// One that went another way, and is over: it may be reported late, and out of order.
  void passed(const OperationId& id, const Descriptor& descriptor);

  /// The descriptor of an operation that ended here not long ago; null of any other.
  [[nodiscard]] const Descriptor* find(uint64_t op_id) const;
  /// It ended here long ago; or it is under way, of a counted one.
  [[nodiscard]] bool isBehind(uint64_t op_id) const noexcept;
  [[nodiscard]] size_t size() const noexcept {
    return recent_order_.size();
  }
  /// Derived ids of older operations.
  [[nodiscard]] size_t forgotten() const noexcept {
    return forgotten_.size();
  }
  /// Writes the last operation into an answer: its descriptor, and its id as `aux`.
  void writeLast(FrameHeader& header) const;

 private:
  void forget(uint64_t op_id, const Descriptor& descriptor);

  std::unordered_map<uint64_t, Descriptor> recent_; ///< operations that have ended
  std::deque<uint64_t> recent_order_; ///< their ids, oldest first
  std::unordered_set<uint64_t> forgotten_; ///< derived ids of collectives that were in it before
  std::deque<uint64_t> forgotten_order_; ///< the same, oldest first
  OperationId last_entered_;
  int64_t highest_sequence_ = 0; ///< of the counted operations
  std::optional<Descriptor> last_descriptor_;
};

} // namespace pycomm
