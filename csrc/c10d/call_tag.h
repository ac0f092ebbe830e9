#pragma once

#include <cstdint>
#include <string_view>

namespace pycomm {

/// What the operations that this thread issues are about, where the caller knows it: for the descriptor's tag, so that a rank that
/// takes one of two otherwise equal operations for the other is found out.
class CallTag {
 public:
  explicit CallTag(uint32_t tag) noexcept;
  ~CallTag();
  CallTag(const CallTag&) = delete;
  CallTag& operator=(const CallTag&) = delete;

  /// Of the innermost scope on this thread; 0 where there is none.
  [[nodiscard]] static uint32_t current() noexcept;

  /// A hash that is the same on every rank; never 0. `before` chains several texts.
  [[nodiscard]] static uint32_t of(std::string_view text, uint32_t before = kNoText) noexcept;

  static constexpr uint32_t kNoText = 2166136261U; ///< FNV-1a's offset basis

 private:
  uint32_t outer_;
};

} // namespace pycomm
