#pragma once

namespace pybind11 {
class module_;
}

namespace pycomm {

/// Adds the functions of the process, not of one group: set_exception_types, set_log_callback, shutdown_all, arm_fault_points,
/// list_interfaces, choose_address, host_identity, simd_level, build_info; in a test build fault_points.
void bindProcess(pybind11::module_& m);

} // namespace pycomm
