#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/codec.h"

namespace pycomm {

// The issuer of an operation determines the operation's id. Two ranks must give the same operation the same id, however their threads
// interleave. With one counter for all, a user's thread and callbacks would race for numbers. So
//   - a user's thread takes the group's counter: ids 1, 2, 3, …
//   - every other strand of the program (a callback, a chain of comm_hooks.ordered) has a name, and its n-th operation in a group takes
//     hash(name, group, n).
// The name of a callback is made where the program adds it to a future (c10d/named_future.h), never where or when it runs.

/// A 64-bit mix with good avalanche (the finaliser of SplitMix64: Steele, Lea, Flood 2014).
[[nodiscard]] uint64_t mix64(uint64_t value) noexcept;

/// The name of a strand, or of a future, from the program's text alone.
///
/// Ranks of different groups never share an operation of either group, so `anywhere` has no operation's id in it: it has the role of
/// the group and the operation's place there. But ranks that are together in one group may have been in different groups before, and
/// give it different roles. What they do share are its operations' ids. So there is a second name, for operations in that group only.
struct StrandName {
  uint64_t anywhere = 0;
  uint64_t at_home = 0;
  uint32_t home = 0; ///< hash of the group in which `at_home` counts; 0: none

  [[nodiscard]] uint64_t in(uint32_t group) const noexcept {
    return home != 0 && group == home ? at_home : anywhere;
  }
  /// What follows this one: both names mixed with `number`.
  [[nodiscard]] StrandName then(uint64_t number) const noexcept;
  /// What `other` made out of this one.
  [[nodiscard]] StrandName by(const StrandName& other) const noexcept;
};

/// An operation's name within its group, equal on all ranks.
struct OperationId {
  uint64_t id = 0; ///< top bit: derived, not counted
  int64_t sequence = -1; ///< the counter's value; -1 where derived
  uint64_t origin = 0; ///< CallbackOrigin::packed(); 0: a user's thread issued it, or it is a message
};

/// Which callback, or which call of a comm hook, issued an operation, in words for people. Travels in 64 bits with questions about the
/// operation, so that an error can name the callback of another rank. The lowest bit is never used.
struct CallbackOrigin {
  enum class Of : uint8_t {
    Nothing = 0,
    Operation = 1,
    Message = 2, ///< `sequence`: how many-th message of the group whose future the program has asked for
    Promise = 3, ///< a future that the program completes itself
    Several = 4, ///< collect_all; the other fields are of the first future
    Chain = 5, ///< no callback: a hook in comm_hooks.ordered
    Part = 6, ///< no callback: what follows the first half of an operation that is made of several
  };
  Of of = Of::Nothing;
  uint32_t number = 0; ///< how many-th callback of that future, from 1; 0: it has no number
  uint32_t depth = 0; ///< how many futures of callbacks lie between
  uint8_t kind = 0; ///< Collective
  uint32_t hook = 0; ///< how many-th hook of its group issued all that, from 1; 0: none did
  uint32_t sequence =
      0; ///< of the operation; 0: a callback issued it. Of a hook: its call, one for each bucket of each step
  uint32_t group =
      0; ///< how many-th group of its process, from 1, which is the default one; of a hook: the one that counts it

  [[nodiscard]] uint64_t packed() const noexcept;
  [[nodiscard]] static CallbackOrigin unpacked(uint64_t bits) noexcept;
  /// Of callbacks of this operation.
  [[nodiscard]] static CallbackOrigin ofOperation(const OperationId& id, uint8_t kind) noexcept;
  /// If a comm hook issued what this follows, its call is the name: what it issued has no number of its own.
  void takeHook(const CallbackOrigin& issuer) noexcept;
  /// "issued in callback 1 of all_reduce #3 in group 2", "issued in call 7 of comm hook 2 in group 1"
  [[nodiscard]] std::string text() const;
};

inline constexpr uint64_t kDerivedIdBit = 1ULL << 63;

/// In the frames by which a receive asks for messages under a tag, and in the answers. No operation has it.
inline constexpr uint64_t kAskForMessagesId = kDerivedIdBit | 2;

/// Which strand completed a future that the program made. Thread-safe.
class Completion {
 public:
  /// The calling strand completes it now. Only the first call counts.
  void note();

 private:
  friend class IssueContext;

  mutable std::mutex mutex_; ///< guards the rest
  bool known_ = false;
  bool first_of_strand_ = false; ///< the strand has completed no such future before
  bool ambiguous_ = false; ///< the strand is
  std::optional<StrandName> strand_; ///< nothing: a user's thread
  std::thread::id thread_;
};

/// What the name of a callback depends on if it follows futures that the program completes itself. Such a future has no place in the
/// program's text that all ranks could count: a rank may make more of them, and complete them where it likes. So
///   - completed by the user's thread that adds the callback, the callback is a part of that thread, as if called by it;
///   - completed in a callback, it is named by that strand. As neither futures nor callbacks that issue nothing may shift a name, there is
///     one such name for each strand: for the first callback of the first future that it completes;
///   - else the callback may not issue.
struct Promised {
  std::vector<std::shared_ptr<const Completion>> completions;
  std::thread::id adder; ///< the user's thread that added the callback
  bool one_adder = true; ///< and the callbacks before it
  bool first = true; ///< the first callback of each such future
};

/// What a strand's operations have in common, and those of callbacks that follow them.
struct StrandTraits {
  std::optional<Codec> codec; ///< sums travel as this, whatever the group's own
  uint32_t tag = 0; ///< collectives have this in their descriptor, so that ranks compare it; 0: none
};

/// A strand that runs now. Used by one thread at a time.
class IssueContext {
 public:
  enum class Counted { Operations, Works, Messages, Promises };

  IssueContext(
      const StrandName& name,
      const CallbackOrigin& origin,
      const StrandTraits& traits = {},
      bool ambiguous = false,
      std::shared_ptr<const Promised> promised = nullptr) noexcept
      : name_(name), origin_(origin), traits_(traits), ambiguous_(ambiguous), promised_(std::move(promised)) {}

  /// The strand as which a callback begins to run: itself, or null if it is a part of the calling user's thread.
  [[nodiscard]] static std::shared_ptr<IssueContext> beginning(const std::shared_ptr<IssueContext>& callback);

  /// With promised(): only its part after the strand that completes, until beginning().
  [[nodiscard]] const StrandName& name() const noexcept {
    return name_;
  }
  /// Null if it follows no future that the program completes itself.
  [[nodiscard]] const std::shared_ptr<const Promised>& promised() const noexcept {
    return promised_;
  }
  [[nodiscard]] const CallbackOrigin& origin() const noexcept {
    return origin_;
  }
  [[nodiscard]] const StrandTraits& traits() const noexcept {
    return traits_;
  }
  /// No other rank can tell which callback it is: nothing may be issued.
  [[nodiscard]] bool ambiguous() const noexcept {
    return ambiguous_;
  }
  /// Counts from 0, for each group (its hash; its role for messages) by itself: ranks that are not in a group issue nothing there.
  [[nodiscard]] uint32_t takeIndex(Counted what, uint64_t group);

  /// The calling thread's context; null on a user's thread.
  [[nodiscard]] static const std::shared_ptr<IssueContext>& current() noexcept;
  /// Of the calling thread's context; none on a user's thread.
  [[nodiscard]] static StrandTraits currentTraits() noexcept {
    return current() == nullptr ? StrandTraits() : current()->traits();
  }

 private:
  StrandName name_;
  const CallbackOrigin origin_;
  const StrandTraits traits_;
  bool ambiguous_;
  const std::shared_ptr<const Promised> promised_;
  std::map<std::pair<Counted, uint64_t>, uint32_t> next_;
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

/// The id of the operation that the calling thread issues now. `counter` is the group's. Throws Error(InvalidArgument) in an ambiguous
/// strand.
[[nodiscard]] OperationId takeOperationId(std::atomic<int64_t>& counter, uint32_t group);

/// The strand that continues operation `id` within its own group, such as the second half of a sparse sum.
[[nodiscard]] std::shared_ptr<IssueContext> continuationOf(const OperationId& id, uint32_t group, uint8_t kind);

} // namespace pycomm
