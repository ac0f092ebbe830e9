#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/codec.h"

namespace pycomm {

/// The issuer of an operation, which determines the operation's id. Two ranks must give the same operation the same id however
/// their threads interleave:
///   - a user's thread takes the group's counter: ids 1, 2, 3, …
///   - a callback of operation P takes hash(P, 0), hash(P, 1), … in the order in which P's callbacks issue them;
///   - a chain (comm_hooks.ordered) takes hash(chain, 0), … both on the thread that runs the chain and in callbacks of the
///     chain's operations.
/// With one counter for all of these, the autograd thread and callbacks would race for numbers.
class IssueContext {
 public:
  enum class Kind { Callback, Chain };

  /// `codec`: what the sums of a chain travel as, whatever the group's own.
  IssueContext(Kind kind, uint64_t base, std::optional<Codec> codec = std::nullopt) noexcept
      : kind_(kind), base_(base), codec_(codec) {}

  [[nodiscard]] Kind kind() const noexcept {
    return kind_;
  }
  [[nodiscard]] uint64_t base() const noexcept {
    return base_;
  }
  [[nodiscard]] const std::optional<Codec>& codec() const noexcept {
    return codec_;
  }
  [[nodiscard]] uint32_t takeIndex() noexcept {
    return next_.fetch_add(1, std::memory_order_relaxed);
  }

  /// The calling thread's context; null on a user's thread.
  [[nodiscard]] static const std::shared_ptr<IssueContext>& current() noexcept;

 private:
  const Kind kind_;
  const uint64_t base_;
  const std::optional<Codec> codec_;
  std::atomic<uint32_t> next_{0};
};

/// Makes `context` the calling thread's, until the scope ends.
class IssueScope {
 public:
  explicit IssueScope(std::shared_ptr<IssueContext> context) noexcept;
  ~IssueScope();
  IssueScope(const IssueScope&) = delete;
  IssueScope& operator=(const IssueScope&) = delete;

 private:
  std::shared_ptr<IssueContext> previous_;
};

/// An operation's name within its group, equal on all ranks.
struct OperationId {
  uint64_t id = 0; ///< top bit: derived, not counted
  int64_t sequence = -1; ///< the counter's value; -1 where derived
};

inline constexpr uint64_t kDerivedIdBit = 1ULL << 63;

/// In the frames by which a receive asks for messages under a tag, and in the answers. No operation has it.
inline constexpr uint64_t kAskForMessagesId = kDerivedIdBit | 2;

/// The id of the operation that the calling thread issues now. `counter` is the group's.
[[nodiscard]] OperationId takeOperationId(std::atomic<int64_t>& counter, uint32_t group) noexcept;

/// The context for callbacks of an operation that was issued in `issuer` (null: by a user's thread).
[[nodiscard]] std::shared_ptr<IssueContext> callbackContext(
    const std::shared_ptr<IssueContext>& issuer,
    uint64_t op_id,
    uint32_t group);

/// A 64-bit mix with good avalanche (the finaliser of SplitMix64: Steele, Lea, Flood 2014).
[[nodiscard]] uint64_t mix64(uint64_t value) noexcept;

} // namespace pycomm
