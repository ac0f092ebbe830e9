#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace pycomm {

/// How far an operation, or a group that is being made, had come when it failed. Ranks compare phases when they choose the cause of a
/// failure. kTexts is what errors print, error frames carry and flight records store.
class ErrorPhase {
 public:
  enum Value : uint8_t {
    Unknown, ///< not printed
    Rendezvous,
    Resolve, ///< of a host name
    Connect,
    NcclInit,
    Matching, ///< before the ranks had compared the operation, or because they differed
    NotStarted, ///< the group had failed before
    NotEntered, ///< of a deadline: some rank has not entered the operation
    CopyToHost, ///< of a CUDA tensor
    Transfer,
    Wait, ///< only the time of one call of wait() was over
    Reset, ///< a control link was reset, which may have swallowed a goodbye. Only in reports between ranks
  };
  static constexpr std::array<const char*, Reset + 1> kTexts = {
      "",
      "rendezvous",
      "resolve",
      "connect",
      "nccl init",
      "matching",
      "not_started",
      "not_entered",
      "copy_to_host",
      "transfer",
      "wait",
      "reset",
  };

  constexpr ErrorPhase(Value value = Unknown) noexcept : value_(value) {}

  /// nullopt if no phase has this text.
  [[nodiscard]] static constexpr std::optional<Value> find(std::string_view text) noexcept {
    for (size_t i = 0; i < kTexts.size(); ++i) {
      if (kTexts[i] == text) {
        return static_cast<Value>(i);
      }
    }
    return std::nullopt;
  }
  [[nodiscard]] constexpr const char* text() const noexcept {
    return kTexts[value_];
  }
  [[nodiscard]] constexpr bool known() const noexcept {
    return value_ != Unknown;
  }
  friend constexpr bool operator==(ErrorPhase, ErrorPhase) noexcept = default;

 private:
  Value value_;
};

} // namespace pycomm
