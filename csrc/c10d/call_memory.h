#pragma once

#include <cstdint>
#include <vector>

#include "engine/call.h"

namespace pycomm {

/// The memory of calls that are under way at the same time: those of one list, or of one coalescing window.
class CallMemory {
 public:
  /// This, and that of the collectives among `calls`. Throws Error(InvalidArgument) if one of all the calls writes memory that another one
  /// reads or writes. What one call does within its own memory is checked where it is made. `op`: for the text.
  [[nodiscard]] CallMemory with(const std::vector<Call>& calls, const char* op) const;

 private:
  struct Extent {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    bool written = false;
    size_t call = 0;
  };

  std::vector<Extent> extents_; ///< by `begin`
  size_t count_ = 0; ///< of calls so far
};

/// Removes each all_reduce that is the same as an earlier one, memory included: a list may hold a tied tensor twice, and one sum is
/// what both of its entries want. The tags of those that stay then say which were removed: all ranks must have the same twins.
void dropTwins(std::vector<Call>& calls);

} // namespace pycomm
