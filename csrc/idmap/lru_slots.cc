#include "idmap/lru_slots.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace pycomm {
namespace {

constexpr int64_t kMostUses = int64_t{1} << 62; // so that counting on does not overflow

[[noreturn]] void refuseState(const std::string& why) {
  ErrorRecord record;
  record.code = ErrorCode::InvalidArgument;
  record.summary = "The state of an id map cannot be used: " + why + ".";
  throw Error(record);
}

} // namespace

LruSlots::LruSlots(int64_t* ids, int64_t* last_uses, int32_t size)
    : ids_(ids), last_uses_(last_uses), size_(size), older_(size, kNone), newer_(size, kNone) {
  slots_.reserve(static_cast<size_t>(size));
  free_.reserve(static_cast<size_t>(size));
  std::vector<int32_t> taken;
  for (int32_t slot = size - 1; slot >= 0; --slot) {
    if (ids[slot] == kFree) {
      free_.push_back(slot);
    } else if (ids[slot] < 0) {
      refuseState("slot " + std::to_string(slot) + " has id " + std::to_string(ids[slot]));
    } else if (last_uses[slot] < 0 || last_uses[slot] > kMostUses) {
      refuseState("slot " + std::to_string(slot) + " was used last at " + std::to_string(last_uses[slot]));
    } else if (!slots_.emplace(ids[slot], slot).second) {
      refuseState("id " + std::to_string(ids[slot]) + " has two slots");
    } else {
      taken.push_back(slot);
    }
  }
  std::sort(taken.begin(), taken.end(), [&](int32_t a, int32_t b) {
    return last_uses[a] != last_uses[b] ? last_uses[a] < last_uses[b] : a < b;
  });
  for (const int32_t slot : taken) {
    append(slot);
    now_ = std::max(now_, last_uses[slot] + 1);
  }
}

int32_t LruSlots::find(int64_t id) const {
  const auto found = slots_.find(id);
  return found == slots_.end() ? kNone : found->second;
}

int32_t LruSlots::insert(int64_t id) {
  if (free_.empty()) {
    return kNone;
  }
  const int32_t slot = free_.back();
  slots_.emplace(id, slot);
  free_.pop_back();
  ids_[slot] = id;
  last_uses_[slot] = now_++;
  append(slot);
  return slot;
}

void LruSlots::use(int32_t slot) {
  unlink(slot);
  append(slot);
  last_uses_[slot] = now_++;
}

void LruSlots::erase(int32_t slot) {
  slots_.erase(ids_[slot]);
  unlink(slot);
  ids_[slot] = kFree;
  last_uses_[slot] = 0;
  free_.push_back(slot);
}

void LruSlots::append(int32_t slot) noexcept {
  older_[slot] = newest_;
  newer_[slot] = kNone;
  (newest_ == kNone ? oldest_ : newer_[newest_]) = slot;
  newest_ = slot;
}

void LruSlots::unlink(int32_t slot) noexcept {
  const int32_t older = older_[slot];
  const int32_t newer = newer_[slot];
  (older == kNone ? oldest_ : newer_[older]) = newer;
  (newer == kNone ? newest_ : older_[newer]) = older;
}

} // namespace pycomm
