#pragma once

#include <cstdint>
#include <string_view>

namespace pycomm {

/// The subject of the operations that this thread issues, if the caller knows it. It becomes the descriptor's tag, so that ranks that
/// issue two otherwise equal operations in different orders get a mismatch.
class CallTag {
 public:
  explicit CallTag(uint32_t tag) noexcept;
  ~CallTag();
  CallTag(const CallTag&) = delete;
  CallTag& operator=(const CallTag&) = delete;

  /// Of the innermost scope on this thread; 0 if there is none.
  [[nodiscard]] static uint32_t current() noexcept;

  /// A hash that is the same on every rank; never 0. `before` chains several texts.
  [[nodiscard]] static uint32_t of(std::string_view text, uint32_t before = kNoText) noexcept;

  static constexpr uint32_t kNoText = 2166136261U; ///< FNV-1a's offset basis

 private:
  uint32_t outer_;
};

} // namespace pycomm
