#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "c10d/process_end.h"
#include "c10d/python_errors.h"

namespace pycomm {

/// Gives the interpreter's lock back for its scope, if the calling thread has it: nothing that blocks holds it. In place of
/// pybind11::gil_scoped_release, which does not know of the end of the process.
class WithoutGil {
 public:
  WithoutGil() {
    if (interpreterIsUsable() && PyGILState_Check() != 0) {
      released_.emplace();
    }
    stayIfProcessEnds();
  }
  ~WithoutGil() {
    if (released_) { // else a scope around this one does it, which may hold a lock meanwhile
      stayBeforeGil();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

/// Has the interpreter's lock for its scope, for code that a future or another thread of native code calls. In place of
/// pybind11::gil_scoped_acquire, which does not know of the end of the process: a thread that must not take the lock then stays here.
class WithGil {
  struct Stay {
    Stay() noexcept {
      stayBeforeGil();
    }
  };

  const Stay stay_;
  const pybind11::gil_scoped_acquire gil_;
};

} // namespace pycomm
