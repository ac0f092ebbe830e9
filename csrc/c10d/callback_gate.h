#pragma once

#include <memory>

namespace pycomm {

/// Holds the completion of a future back until the Python code that asked for it has hung its callbacks on it.
///
/// torch runs a callback on the calling thread when the future is complete already at `.then()`. Operations issued there would take the
/// group's counter, and those of a rank that was slower the callback's own numbers: a mismatch. So a future that is handed to Python
/// code completes when one of these holds:
///   - the function that called get_future() has returned: exact, and what a DDP comm hook does;
///   - its thread is blocked outside the interpreter (it waits, perhaps for this very future);
///   - its thread has used 2 ms of processor time since, more than a few calls of `.then()` take; or half a second has passed.
/// What remains is a thread that loses the processor for long between get_future() and then().
class CallbackGate {
 public:
  /// Remembers the caller's Python frame. Null where the calling thread does not hold the interpreter's lock: C++ code hangs its
  /// callbacks on without one. Needs nothing.
  [[nodiscard]] static std::unique_ptr<CallbackGate> ofCaller();
  ~CallbackGate();
  CallbackGate(const CallbackGate&) = delete;
  CallbackGate& operator=(const CallbackGate&) = delete;

  /// Waits as said above. On a callback thread, without the interpreter's lock.
  void pass() const;

 private:
  struct Caller;
  explicit CallbackGate(std::unique_ptr<Caller> caller);
  std::unique_ptr<Caller> caller_;
};

} // namespace pycomm
