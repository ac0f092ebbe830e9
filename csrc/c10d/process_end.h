#pragma once

namespace pycomm {

// Python ends a thread that asks for its lock when the interpreter has gone: by pthread_exit, until Python 3.13. Unwinding C++ frames,
// that is std::terminate, and a process that has succeeded ends with SIGABRT. Python waits for threads that are no daemons, and pycomm
// for its callbacks; a daemon thread in a call of pycomm stays there for good instead, as Python 3.14 makes it.

/// The interpreter ends soon, and this thread ends it: all others that come to stayIfProcessEnds() from now on stay there. Call it
/// before anything wakes them.
void beginProcessEnd() noexcept;

/// Does not return once the process ends, unless the calling thread ends it, does what the callback pool waits for, holds the interpreter's
/// lock, or is within a StayWithin. Call it before returning to code that takes the interpreter's lock; never with a lock held that the end
/// of a process needs. Costs a load of a flag.
void stayIfProcessEnds() noexcept;

/// As stayIfProcessEnds(), also within a StayWithin: for code that is about to take the interpreter's lock, whatever it holds.
void stayBeforeGil() noexcept;

/// Whether beginProcessEnd() was called on this thread: no other one may be left to give back what it holds.
[[nodiscard]] bool endsProcess() noexcept;

/// Whether the calling thread may take the interpreter's lock. If it may not because the process ends, this returns within a StayWithin only.
[[nodiscard]] bool mayTakeGil() noexcept;

/// The body of a function that torch calls without the interpreter's lock: enters and leaves it by stayIfProcessEnds(). In between the
/// thread does not stay, since it may hold a lock, such as a reducer's turn, which the program's own end may want. It goes on until it
/// leaves the outermost of these: what it waits for fails when the engine is shut down.
class StayWithin {
 public:
  StayWithin() noexcept {
    enter();
  }
  ~StayWithin() {
    leave();
  }
  StayWithin(const StayWithin&) = delete;
  StayWithin& operator=(const StayWithin&) = delete;

  static void enter() noexcept;
  static void leave() noexcept;
};

} // namespace pycomm
