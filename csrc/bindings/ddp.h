#pragma once

namespace pybind11 {
class module_;
}

namespace pycomm {

/// Adds Reducer, ReducerStats and DdpLogger. torch must have been imported: ProcessGroup and GradBucket are its own.
void bindDdp(pybind11::module_& m);

} // namespace pycomm
