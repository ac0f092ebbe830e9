#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type_base.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/wait_point.h"
#include "c10d/group_role.h"
#include "engine/engine.h"
#include "engine/operation/issue_context.h"

namespace pycomm {

// Callbacks are named where the program adds them to a future: the name of the callback is (name of the future, how many-th callback of
// it), and the future of its result has the callback's name. Both are facts of the program's text, so all ranks agree on them,
// whenever a future completes, and on whatever thread its callbacks run.
//
// torch's future is a final class without room for a name. But each future keeps the type of its value as a shared object that torch only
// passes on: ours has the name in it, and lives exactly as long as the future. (A table beside the futures would need weak pointers to
// them, which keep their tensors: ivalue::Future lets go of nothing before its memory goes.)

/// The type of a future's value, with the future's name.
class FutureName final : public c10::Type, public std::enable_shared_from_this<FutureName> {
 public:
  /// `engine`: its pool runs callbacks that are added when the future is complete; null: they run in place, as torch's do.
  FutureName(
      c10::TypePtr value,
      const StrandName& name,
      const CallbackOrigin& origin,
      const StrandTraits& traits,
      Engine* engine,
      bool ambiguous = false,
      std::vector<std::weak_ptr<FutureName>> parents = {},
      std::shared_ptr<const Promised> promised = nullptr);

  /// Of this future; null if it has no name.
  [[nodiscard]] static std::shared_ptr<FutureName> of(const c10::ivalue::Future& future);

  [[nodiscard]] const StrandName& name() const noexcept {
    return name_;
  }
  [[nodiscard]] const CallbackOrigin& origin() const noexcept {
    return origin_;
  }
  [[nodiscard]] Engine* engine() const noexcept {
    return engine_;
  }
  [[nodiscard]] bool ambiguous() const noexcept {
    return ambiguous_;
  }
  [[nodiscard]] const std::shared_ptr<const Promised>& promised() const noexcept {
    return promised_;
  }
  /// The program has waited for it: from now on callbacks run where they are added.
  /// As it is for what it follows, which has ended by then.
  void noteWaited() noexcept;
  /// A callback that is added to the complete future now must not run on this thread. A program that adds it without having waited can
  /// rely on nothing else; and the thread's next line may be what other ranks wait for.
  [[nodiscard]] bool leavesThread() const noexcept;

  /// The strand of the callback that the calling strand adds now.
  [[nodiscard]] std::shared_ptr<IssueContext> addCallback();
  /// Of callbacks that C++ code added, which has no names: they share one.
  [[nodiscard]] std::shared_ptr<IssueContext> unnamedCallbacks() const;

  [[nodiscard]] bool equals(const c10::Type& rhs) const override;
  [[nodiscard]] bool symmetric() const override {
    return false;
  }
  [[nodiscard]] std::string str() const override {
    return value_->str();
  }

 private:
  const c10::TypePtr value_;
  const StrandName name_;
  const CallbackOrigin origin_;
  const StrandTraits traits_;
  Engine* const engine_; ///< never destroyed: see processEngine()
  const bool ambiguous_;
  std::atomic<bool> waited_{false};
  const std::vector<std::weak_ptr<FutureName>> parents_;
  const std::shared_ptr<const Promised> promised_;
  LeafMutex mutex_; ///< guards the next two
  std::map<uint64_t, uint32_t> added_; ///< callbacks so far, by the strand that added them; 0: user threads
  OneThread adds_; ///< of those of user threads
};

/// The name of a Work's future.
struct WorkName {
  StrandName name;
  CallbackOrigin origin;
  bool ambiguous = false; ///< see IssueContext::ambiguous()
};
/// Of a Work whose first operation is `id`. `place`: among all that its strand has issued in the group. `type`: of the Work, as a coalesced
/// one has the first operation of another.
[[nodiscard]] WorkName nameOfWork(
    GroupRole& role,
    uint32_t group,
    const OperationId& id,
    uint64_t place,
    int type,
    uint8_t kind);
/// Of the next message of the group whose future the calling strand asks for. (A message's id is its two ranks' business.)
[[nodiscard]] WorkName nameOfMessage(GroupRole& role, uint8_t kind);

/// The name of a future that the program made, and completes itself (torch.futures.Future). Such a future has a type of torch's.
class Promise {
 public:
  Promise();
  /// The calling strand completes it now.
  void complete() {
    completion_->note();
  }
  [[nodiscard]] const std::shared_ptr<FutureName>& name() const noexcept {
    return name_;
  }

 private:
  std::shared_ptr<Completion> completion_;
  std::shared_ptr<FutureName> name_; ///< no type of any value
};

/// The type of the future of the result of `callback`, which was added to `future`.
[[nodiscard]] c10::TypePtr resultOf(
    const IssueContext& callback,
    const c10::ivalue::Future& future,
    Engine* engine,
    c10::TypePtr value);

/// The type of the future of all `parts`: collect_all counts as a callback of each. `parts`: by place, null for those without a name. Null
/// if none has one. Operations' futures alone give the name, if there are any.
[[nodiscard]] c10::TypePtr collected(const std::vector<std::shared_ptr<FutureName>>& parts, c10::TypePtr value);

/// Torch's destructor of a future makes the device of each of its events the current one, and ends the process if a broken device refuses
/// that: such a future is leaked. Call it where the last reference may be dropped next.
void keepIfBroken(c10::ivalue::Future& future) noexcept;

/// While a future is completed on a thread of the program's: its callbacks with names run in the pool all the same.
class NamedCallbacksInPool {
 public:
  NamedCallbacksInPool() noexcept;
  ~NamedCallbacksInPool();
  NamedCallbacksInPool(const NamedCallbacksInPool&) = delete;
  NamedCallbacksInPool& operator=(const NamedCallbacksInPool&) = delete;

 private:
  const bool before_;
};

/// Runs `callback` in the strand `context` when `future` completes; see FutureName::leavesThread().
void addNamed(
    const c10::intrusive_ptr<c10::ivalue::Future>& future,
    const std::shared_ptr<IssueContext>& context,
    std::function<void()> callback);

} // namespace pycomm
