#pragma once

#include <pybind11/pybind11.h>

#include "c10d/process_end.h"

namespace pycomm {

/// Gives the interpreter's lock back for its scope. In place of pybind11::gil_scoped_release, which does not know of the end.
class WithoutGil {
 public:
  WithoutGil() = default;
  ~WithoutGil() {
    stayIfProcessEnds();
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  pybind11::gil_scoped_release released_;
};

} // namespace pycomm
