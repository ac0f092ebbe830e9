#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pycomm {

/// IdMap on tensors, for TorchRec's tables.
void bindIdMap(pybind11::module_& m);

} // namespace pycomm
