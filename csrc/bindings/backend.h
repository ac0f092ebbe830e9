#pragma once

namespace pybind11 {
class module_;
}

namespace pycomm {

/// Adds create_backend, last_error, describe_backend.
void bindBackend(pybind11::module_& m);

} // namespace pycomm
