#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "transport/memory/memory_key.h"
#include "transport/memory/shared_arena.h"

namespace pycomm {

/// The memory of groups that other processes may ask this one for: one or two keys per group that forms. It lives as long as the offer.
class MemoryOffers {
 public:
  using Memory = std::shared_ptr<const SharedArena>;

  /// `memory`: null if there is none.
  void set(const MemoryKey& key, Memory memory) {
    remove(key);
    offers_.emplace_back(key, std::move(memory));
  }
  void remove(const MemoryKey& key) noexcept {
    offers_.erase(
        std::remove_if(offers_.begin(), offers_.end(), [&](const auto& offer) { return offer.first == key; }),
        offers_.end());
  }
  /// Null if nothing is offered for the key.
  [[nodiscard]] const Memory* find(const MemoryKey& key) const noexcept {
    const Memory* found = nullptr;
    for (const auto& [offered, memory] : offers_) { // to the end: the time does not depend on the key
      found = offered == key ? &memory : found;
    }
    return found;
  }

 private:
  std::vector<std::pair<MemoryKey, Memory>> offers_;
};

} // namespace pycomm
