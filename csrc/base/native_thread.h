#pragma once

#include <functional>
#include <string>
#include <thread>

namespace pycomm {

/// Which signals are blocked on a thread of the library.
enum class SignalMask {
  All, ///< the kernel delivers them to the program's own threads, whose waits they interrupt
  AsCaller, ///< the thread runs code of the program: a process that this starts inherits the mask, and SIGTERM shall end it
};

/// Starts a thread of the library. The calling thread's signal mask is unchanged, also if this throws.
///
/// `name` is the thread's name in the kernel, which keeps the first 15 characters. `body` must not throw.
/// Throws Error(SystemError) if the thread cannot be started, std::bad_alloc.
[[nodiscard]] std::thread startNativeThread(
    const std::string& name,
    std::function<void()> body,
    SignalMask mask = SignalMask::All);

} // namespace pycomm
