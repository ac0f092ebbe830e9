#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "transport/memory/memory_key.h"

namespace pycomm {

/// The memory of groups that other processes may ask this one for: one or two keys per group that forms. Borrows the descriptors.
class MemoryOffers {
 public:
  /// `memory`: -1 if there is none.
  void set(const MemoryKey& key, int memory) {
    remove(key);
    offers_.emplace_back(key, memory);
  }
  void remove(const MemoryKey& key) noexcept {
    offers_.erase(
        std::remove_if(offers_.begin(), offers_.end(), [&](const auto& offer) { return offer.first == key; }),
        offers_.end());
  }
  [[nodiscard]] std::optional<int> find(const MemoryKey& key) const noexcept {
    std::optional<int> found;
    for (const auto& [offered, memory] : offers_) { // to the end: the time does not depend on the key
      found = offered == key ? memory : found;
    }
    return found;
  }

 private:
  std::vector<std::pair<MemoryKey, int>> offers_;
};

} // namespace pycomm
