#pragma once

#include <functional>
#include <string>
#include <thread>

namespace pycomm {

/// Starts a thread of the library. All signals are blocked on it: they belong to the interpreter's threads, and a
/// handler on a native thread would touch Python from there. The calling thread's signal mask is unchanged, also if
/// this throws.
///
/// `name` is the thread's name in the kernel, which keeps the first 15 characters. `body` must not throw.
/// Throws Error(SystemError) if the thread cannot be started, std::bad_alloc.
[[nodiscard]] std::thread startNativeThread(const std::string& name, std::function<void()> body);

} // namespace pycomm
