#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>

#include "engine/operation/descriptor.h"
#include "engine/operation/issue_context.h"
#include "transport/frame_header.h"

namespace pycomm {

/// What this rank has entered so far: the last operation, which it names to ranks that ask, and the last 256 that have ended.
/// Thread: the RollCall's owner's.
class EntryHistory {
 public:
  static constexpr size_t kRecent = 256;

  void entered(const OperationId& id, const Descriptor& descriptor);
  void ended(uint64_t op_id, const Descriptor& descriptor);
  /// One that went another way, and is over: it may be reported late, and out of order.
  void passed(const OperationId& id, const Descriptor& descriptor);

  /// The descriptor of an operation that ended here not long ago; null of any other.
  [[nodiscard]] const Descriptor* find(uint64_t op_id) const;
  /// A counted id that this rank has passed: it ended here, maybe long ago. (Or it is under way.)
  [[nodiscard]] bool isBehind(uint64_t op_id) const noexcept {
    return (op_id & kDerivedIdBit) == 0 && static_cast<int64_t>(op_id) <= highest_sequence_;
  }
  [[nodiscard]] size_t size() const noexcept {
    return recent_order_.size();
  }
  /// Writes the last operation into an answer: its descriptor, and its id as `aux`.
  void writeLast(FrameHeader& header) const;

 private:
  std::unordered_map<uint64_t, Descriptor> recent_; ///< operations that have ended
  std::deque<uint64_t> recent_order_; ///< their ids, oldest first
  OperationId last_entered_;
  int64_t highest_sequence_ = 0; ///< of the counted operations
  std::optional<Descriptor> last_descriptor_;
};

} // namespace pycomm
