#include "engine/monitor/entry_history.h"

#include <algorithm>

namespace pycomm {

void EntryHistory::entered(const OperationId& id, const Descriptor& descriptor) {
  last_entered_ = id;
  highest_sequence_ = std::max(highest_sequence_, id.sequence);
  last_descriptor_ = descriptor;
}

void EntryHistory::ended(uint64_t op_id, const Descriptor& descriptor) {
  recent_[op_id] = descriptor;
  recent_order_.push_back(op_id);
  if (recent_order_.size() > kRecent) {
    forget(recent_order_.front());
    recent_.erase(recent_order_.front());
    recent_order_.pop_front();
  }
}

void EntryHistory::forget(uint64_t op_id) {
  if ((op_id & kDerivedIdBit) == 0) {
    return; // its number says when it was
  }
  if (forgotten_.size() < kForgotten) {
    forgotten_.push_back(op_id);
  } else {
    forgotten_[next_forgotten_] = op_id;
    next_forgotten_ = (next_forgotten_ + 1) % kForgotten;
  }
}

bool EntryHistory::isBehind(uint64_t op_id) const noexcept {
  return (op_id & kDerivedIdBit) == 0 ? static_cast<int64_t>(op_id) <= highest_sequence_
                                      : std::find(forgotten_.begin(), forgotten_.end(), op_id) != forgotten_.end();
}

void EntryHistory::passed(const OperationId& id, const Descriptor& descriptor) {
  ended(id.id, descriptor);
  if (id.sequence > highest_sequence_) { // entered later than the last one that was entered here
    entered(id, descriptor);
  }
}

const Descriptor* EntryHistory::find(uint64_t op_id) const {
  const auto found = recent_.find(op_id);
  return found == recent_.end() ? nullptr : &found->second;
}

void EntryHistory::writeLast(FrameHeader& header) const {
  if (last_descriptor_) {
    last_descriptor_->writeTo(header);
  }
  header.aux = last_entered_.id;
}

} // namespace pycomm
