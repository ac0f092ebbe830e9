#pragma once

#include <cstdint>

namespace pycomm {

/// How often this process image came out of a fork() since installForkGuard(): 0 in the process that loaded the library. What was made
/// under another count belongs to the parent.
[[nodiscard]] uint32_t forkCount() noexcept;

/// From now on a child of fork() closes, before anything else runs there, every descriptor that a UniqueFd holds. Otherwise a child
/// keeps its dead parent's connections open, and the other ranks learn of the death only by its silence. Idempotent.
///
/// Not installed by itself: a test may fork in order to part the two ends of a link.
void installForkGuard() noexcept;

/// While one exists on any thread, fork() waits on the others; on that thread itself it does not. Two threads that
/// each hold one may fork at the same time with glibc 2.36 or newer; an older one runs the handlers of one fork at a time. For the few instructions between a
/// system call that makes or closes a descriptor and the note that is taken of it. Keeps errno. Nothing is held off before
/// installForkGuard().
class ForksHeldOff {
 public:
  ForksHeldOff() noexcept;
  ~ForksHeldOff();
  ForksHeldOff(const ForksHeldOff&) = delete;
  ForksHeldOff& operator=(const ForksHeldOff&) = delete;
};

/// Called by UniqueFd: `fd` is to be closed in children, or no longer.
void guardFd(int fd) noexcept;
void unguardFd(int fd) noexcept;

} // namespace pycomm
