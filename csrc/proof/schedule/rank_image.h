#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "proof/schedule/global_graph.h"
#include "proof/schedule/interpreter.h"

namespace pycomm {

/// Bytes of one allocation.
struct Extent {
  size_t space = 0; ///< which allocation
  int64_t begin = 0;
  int64_t end = 0;

  [[nodiscard]] bool overlaps(const Extent& other) const noexcept {
    return space == other.space && begin < other.end && other.begin < end;
  }
  [[nodiscard]] bool operator==(const Extent& other) const noexcept {
    return space == other.space && begin == other.begin && end == other.end;
  }
};

struct Access {
  Extent extent;
  bool writes = false;
};

/// One rank's buffers while it is interpreted. In place, Input and Output are parts of one allocation.
class RankImage {
 public:
  /// `own_offset`: where, in place, the smaller of Input and Output begins in the larger, in elements.
  RankImage(const Schedule& schedule, const RankMemory& memory, bool in_place, int64_t own_offset);

  /// Throws Error(Internal) where a step of this rank leaves its buffers, writes Input out of place, or overlaps
  /// itself.
  void check(const GlobalGraph& graph, NodeId node) const;

  [[nodiscard]] Extent extent(const Schedule& schedule, const Region& region) const;
  [[nodiscard]] std::byte* at(const Schedule& schedule, const Region& region);

  /// What a step reads and writes. Nothing for a Copy of memory onto itself.
  [[nodiscard]] std::vector<Access> accesses(const Schedule& schedule, const Step& step) const;

  void copyTo(RankMemory& memory) const;

 private:
  struct Place {
    size_t space = 0;
    int64_t begin = 0; ///< bytes
    int64_t nbytes = 0;
  };
  [[nodiscard]] Place place(Buffer buffer) const;

  Place input_;
  Place output_;
  std::vector<std::vector<std::byte>> spaces_; ///< 0: Input, or both in place; 1: Output; 2 + k: scratch k
};

} // namespace pycomm
