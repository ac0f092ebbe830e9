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
    const auto oldest = recent_.find(recent_order_.front());
    if (oldest != recent_.end()) {
      forget(oldest->first, oldest->second);
      recent_.erase(oldest);
    }
    recent_order_.pop_front();
  }
}

void EntryHistory::forget(uint64_t op_id, const Descriptor& descriptor) {
  if ((op_id & kDerivedIdBit) == 0 || descriptor.kind == Collective::Send) {
    return; // its number says when it was, as a message's does
  }
  if (!forgotten_.insert(op_id).second) {
    return;
  }
  forgotten_order_.push_back(op_id);
  if (forgotten_order_.size() > kForgotten) {
    forgotten_.erase(forgotten_order_.front());
    forgotten_order_.pop_front();
  }
}

bool EntryHistory::isBehind(uint64_t op_id) const noexcept {
  return (op_id & kDerivedIdBit) == 0 ? static_cast<int64_t>(op_id) <= highest_sequence_ : forgotten_.count(op_id) != 0;
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
