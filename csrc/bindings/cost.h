#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pycomm {

/// What collectives cost on a virtual network.
void bindCost(pybind11::module_& m);

} // namespace pycomm
