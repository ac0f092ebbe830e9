#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pycomm {

/// Steps that survive the death of ranks.
void bindElastic(pybind11::module_& m);

} // namespace pycomm
