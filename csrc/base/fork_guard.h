#pragma once

#include <cstdint>

namespace pycomm {

/// The number of fork() calls between installForkGuard() and this process image: 0 in the process that loaded the
/// library. An object that was made under another count belongs to the parent.
[[nodiscard]] uint32_t forkCount() noexcept;

/// From now on a child of fork() first closes every descriptor that a UniqueFd holds. Otherwise the child would keep
/// its dead parent's connections open, and the other ranks would detect the death only by silence. Idempotent.
///
/// Loading the library does not install the guard: a test may fork in order to separate the two ends of a link.
void installForkGuard() noexcept;

/// Delays fork() on all other threads while it exists, but not on its own thread. Meant for the few instructions
/// between a system call that opens or closes a descriptor and the guardFd() call that records it. Keeps errno. Has no
/// effect before installForkGuard().
///
/// Two threads that each hold one may fork at the same time with glibc 2.36 or newer; older versions run the handlers
/// of one fork at a time.
class ForksHeldOff {
 public:
  ForksHeldOff() noexcept;
  ~ForksHeldOff();
  ForksHeldOff(const ForksHeldOff&) = delete;
  ForksHeldOff& operator=(const ForksHeldOff&) = delete;
};

/// UniqueFd calls these: children of fork() close `fd` from guardFd() until unguardFd().
void guardFd(int fd) noexcept;
void unguardFd(int fd) noexcept;

} // namespace pycomm
