#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "transport/memory/shared_arena.h"
#include "transport/memory/shared_ring.h"

namespace pycomm {

/// Where the rings between the ranks of one host lie in the memory that they share: one for each of them to each, in the order of ranks.
/// Only those that are used have pages.
struct HostRings {
  std::shared_ptr<const SharedArena> arena;
  size_t begin = 0; ///< of the first one
  std::vector<int> ranks; ///< of this host, ascending
  size_t at_once = SharedArena::kMostAtOnce; ///< see SharedArena::commit()

  /// However many ranks share the host, a rank's rings to all others have no more bytes than this together.
  static constexpr size_t kRankNbytes = 8 << 20;
  static constexpr size_t kLargest = 1 << 20;
  static constexpr size_t kSmallest = 64 << 10;

  /// Of one ring; a power of two.
  [[nodiscard]] static constexpr size_t ringNbytes(size_t ranks) noexcept {
    size_t nbytes = kLargest;
    while (nbytes > kSmallest && nbytes * ranks > kRankNbytes) {
      nbytes /= 2;
    }
    return nbytes;
  }
  [[nodiscard]] static constexpr size_t totalNbytes(size_t ranks) noexcept {
    return ranks * ranks * RingMemory::totalNbytes(ringNbytes(ranks));
  }

  [[nodiscard]] bool holds(int rank) const noexcept {
    return std::binary_search(ranks.begin(), ranks.end(), rank);
  }
  [[nodiscard]] RingMemory between(int from, int to) const noexcept {
    return {arena->at(offset(from, to)), ringNbytes(ranks.size())};
  }
  /// Makes its pages exist. Throws Error(NoSharedMemory).
  void commit(int from, int to) const {
    arena->commit(offset(from, to), RingMemory::totalNbytes(ringNbytes(ranks.size())), at_once);
  }

 private:
  [[nodiscard]] size_t offset(int from, int to) const noexcept {
    const size_t index = place(from) * ranks.size() + place(to);
    return begin + index * RingMemory::totalNbytes(ringNbytes(ranks.size()));
  }
  [[nodiscard]] size_t place(int rank) const noexcept {
    return static_cast<size_t>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
  }
};

} // namespace pycomm
