#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pycomm {

/// The wire codecs on tensors, for communication hooks.
void bindCodecs(pybind11::module_& m);

} // namespace pycomm
