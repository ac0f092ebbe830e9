#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pycomm {

void bindSecret(py::module_& m);

} // namespace pycomm
