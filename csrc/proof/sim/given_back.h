#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#if defined(__has_feature) // clang's test for it
#if __has_feature(address_sanitizer)
#define PYCOMM_SIM_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define PYCOMM_SIM_ASAN 1
#endif

#if defined(PYCOMM_SIM_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace pycomm::sim {

/// The memory of an operation that has ended, as reused by the program: it holds a pattern. A byte that arrives late
/// destroys the pattern. A byte that is sent late carries the pattern into another rank's result, which the oracle does
/// not expect. AddressSanitizer reports either at once.
class GivenBack {
 public:
  explicit GivenBack(std::vector<std::byte> memory) : memory_(std::move(memory)) {
    std::fill(memory_.begin(), memory_.end(), kPattern);
#if defined(PYCOMM_SIM_ASAN)
    ASAN_POISON_MEMORY_REGION(memory_.data(), memory_.size());
#endif
  }
  GivenBack(GivenBack&&) noexcept = default; // a vector that moves keeps its memory
  GivenBack& operator=(GivenBack&&) = delete;
  ~GivenBack() {
    allowAccess();
  }

  /// Call at the end of the run. True if the pattern was overwritten.
  [[nodiscard]] bool written() const {
    allowAccess();
    return std::any_of(memory_.begin(), memory_.end(), [](std::byte byte) { return byte != kPattern; });
  }

 private:
  static constexpr std::byte kPattern{0xd7};

  void allowAccess() const noexcept {
#if defined(PYCOMM_SIM_ASAN)
    ASAN_UNPOISON_MEMORY_REGION(memory_.data(), memory_.size());
#endif
  }

  std::vector<std::byte> memory_;
};

} // namespace pycomm::sim
