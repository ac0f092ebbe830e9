#pragma once

namespace pycomm {

// Python ends a thread that asks for its lock when the interpreter has gone: by pthread_exit, until Python 3.13. Unwinding C++ frames,
// that is std::terminate, and a process that has succeeded ends with SIGABRT. Python waits for threads that are no daemons, and pycomm
// for its callbacks; a daemon thread in a call of pycomm stays there for good instead, as Python 3.14 makes it.

/// The interpreter ends soon, and this thread ends it: all others that come to stayIfProcessEnds() from now on stay there. Call it
/// before anything wakes them.
void beginProcessEnd() noexcept;

/// Does not return once the process ends, unless the calling thread ends it, is one of the callback pool's, for which the end waits, or
/// holds the interpreter's lock. Call it before taking that lock, and before returning to code that takes it; never with a lock held
/// that the end of a process needs. Costs a load of a flag.
void stayIfProcessEnds() noexcept;

/// The body of a function that torch calls without the interpreter's lock: enters and leaves it by stayIfProcessEnds().
class StayWithin {
 public:
  StayWithin() noexcept {
    stayIfProcessEnds();
  }
  ~StayWithin() {
    stayIfProcessEnds();
  }
  StayWithin(const StayWithin&) = delete;
  StayWithin& operator=(const StayWithin&) = delete;
};

} // namespace pycomm
