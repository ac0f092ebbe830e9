#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "proof/schedule/global_graph.h"
#include "proof/schedule/interpreter.h"

namespace pycomm {

/// A range of bytes in one allocation.
struct Extent {
  size_t space = 0; ///< index of the allocation
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

/// One rank's buffers during the interpretation. In place, Input and Output are parts of one allocation.
class RankImage {
 public:
  /// `own_offset`: in place, the element of the larger of Input and Output at which the smaller begins.
  RankImage(const Schedule& schedule, const RankMemory& memory, bool in_place, int64_t own_offset);

  /// Throws Error(Internal) if a step of this rank leaves its buffers, writes Input out of place, or overlaps itself.
  /// itself.
  void check(const GlobalGraph& graph, NodeId node) const;

  [[nodiscard]] Extent extent(const Schedule& schedule, const Region& region) const;
  [[nodiscard]] std::byte* at(const Schedule& schedule, const Region& region);

  /// The reads and writes of a step. Empty for a Copy of memory onto itself.
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
