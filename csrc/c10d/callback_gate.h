#pragma once

#include <memory>

namespace pycomm {

/// Delays the completion of a future until the Python code that asked for it has added its callbacks.
///
/// torch runs a callback on the calling thread if the future is already complete at `.then()`. Operations issued there would take
/// numbers of the group's counter. On a slower rank they would take the callback's own numbers: a mismatch. So a future for Python code
/// completes when one of these holds:
///   - the function that called get_future() has returned: exact, and true of a DDP comm hook;
///   - its thread is blocked outside the interpreter (it waits, perhaps for this very future);
///   - its thread has used 2 ms of processor time since, more than a few calls of `.then()` take; or half a second has passed.
/// It still fails for a thread that gets no processor for longer than that between get_future() and then().
class CallbackGate {
 public:
  /// Remembers the caller's Python frame. Null if the calling thread does not hold the interpreter's lock: C++ code needs no
  /// gate. The caller may or may not hold it.
  [[nodiscard]] static std::unique_ptr<CallbackGate> ofCaller();
  ~CallbackGate();
  CallbackGate(const CallbackGate&) = delete;
  CallbackGate& operator=(const CallbackGate&) = delete;

  /// Waits for one of the conditions above. On a callback thread, without the interpreter's lock.
  void pass() const;

 private:
  struct Caller;
  explicit CallbackGate(std::unique_ptr<Caller> caller);
  std::unique_ptr<Caller> caller_;
};

} // namespace pycomm
