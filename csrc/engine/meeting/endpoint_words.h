#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pycomm {

// What a process and an endpoint say to each other, after the Hello: one request, one answer, in turn. Each is a frame of 4 bytes with its length
// and then texts, each with 4 bytes of length before it. The first text says what it is.

/// After the Hello, or the last answer: who asks for nothing for so long hangs up, and is dropped if it has not entered.
inline constexpr std::chrono::seconds kUnusedFor{10};

/// Bytes of a frame. A list of a round comes in parts of 1 MiB (StoreRound).
inline constexpr size_t kMaxEndpointFrame = 2 << 20;
/// The same before the process has entered: names, numbers and a handle.
inline constexpr size_t kMaxFirstEndpointFrame = 2 << 10;

namespace endpoint_request {
inline constexpr std::string_view kEnter = "enter"; ///< to, from, instance, uuid, rank: kHere, or why not
inline constexpr std::string_view kLook = "look"; ///< the same, without entering
inline constexpr std::string_view kSet = "set"; ///< key, value
inline constexpr std::string_view kFind = "find"; ///< key: kHere and the value, or kNone
inline constexpr std::string_view kHas = "has"; ///< key: kHere or kNone
inline constexpr std::string_view kAdd = "add"; ///< key, number: kHere and the sum
inline constexpr std::string_view kRemove = "remove"; ///< key: kHere or kNone
inline constexpr std::string_view kReady = "ready"; ///< kHere, how many are ready, and the first rank that is not
inline constexpr std::string_view kFail = "fail"; ///< an ErrorRecord: kHere, or kComplete
inline constexpr std::string_view kAgree =
    "agree"; ///< to, from, the handle of `from`: kHere, and from then on this process says kSay only
inline constexpr std::string_view kSay = "say"; ///< a message of the agreement: kHere
inline constexpr std::string_view kWho = "who"; ///< to, which is "" at a fixed port: kHere and Mailbox::notice()
inline constexpr std::string_view kGive =
    "give"; ///< to, from, the handle of `from`: kHere, and from then on this process says kState only
inline constexpr std::string_view kState = "state"; ///< of a newcomer, a part of the members' state: kHere or kNone
} // namespace endpoint_request

namespace endpoint_answer {
inline constexpr std::string_view kHere = "here";
inline constexpr std::string_view kNone = "none";
inline constexpr std::string_view kNotYet =
    "not yet"; ///< that member has not called reconfigure() with this uuid: ask again
inline constexpr std::string_view kGone = "gone"; ///< this endpoint knows no such incarnation
inline constexpr std::string_view kOther = "other"; ///< that member has called it with this uuid and another list; why
inline constexpr std::string_view kFailed = "failed"; ///< an ErrorRecord
inline constexpr std::string_view kComplete = "complete"; ///< all members are ready, so it cannot fail any more
} // namespace endpoint_answer

[[nodiscard]] inline std::string packWords(const std::vector<std::string_view>& words) {
  std::string out(sizeof(uint32_t), '\0');
  const auto put = [&](size_t at, size_t number) {
    const auto length = static_cast<uint32_t>(number);
    std::memcpy(out.data() + at, &length, sizeof length);
  };
  for (const std::string_view word : words) {
    const size_t at = out.size();
    out.append(sizeof(uint32_t), '\0');
    put(at, word.size());
    out.append(word);
  }
  put(0, out.size() - sizeof(uint32_t));
  return out;
}

/// The texts of a frame without its length. Takes any bytes; nullopt if nobody packed them.
[[nodiscard]] inline std::optional<std::vector<std::string>> unpackWords(std::string_view frame) {
  std::vector<std::string> words;
  while (!frame.empty()) {
    uint32_t length = 0;
    if (frame.size() < sizeof length) {
      return std::nullopt;
    }
    std::memcpy(&length, frame.data(), sizeof length);
    frame.remove_prefix(sizeof length);
    if (frame.size() < length) {
      return std::nullopt;
    }
    words.emplace_back(frame.substr(0, length));
    frame.remove_prefix(length);
  }
  return words.empty() ? std::nullopt : std::optional<std::vector<std::string>>(std::move(words));
}

} // namespace pycomm
