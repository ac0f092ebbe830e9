#pragma once

namespace pybind11 {
class module_;
}

/// What each file of this folder adds to the module.
namespace pycomm {

/// The functions of the process, not of one group: set_exception_types, set_log_callback, shutdown_all, arm_fault_points,
/// list_interfaces, choose_address, host_identity, simd_level, build_info; in a test build fault_points.
void bindProcess(pybind11::module_& m);
/// Secret, which create_backend takes: so before bindBackend().
void bindSecret(pybind11::module_& m);
/// create_backend, last_error, describe_backend.
void bindBackend(pybind11::module_& m);
/// IssueChain, fail_future, and what pycomm/_native/callback_names.py calls for torch's futures.
void bindFutures(pybind11::module_& m);
/// The wire codecs on tensors, for communication hooks.
void bindCodecs(pybind11::module_& m);
/// Steps that survive the death of ranks. A reducer's arguments have one: so before bindDdp().
void bindElastic(pybind11::module_& m);
/// Reducer, ReducerStats and DdpLogger. torch must have been imported: ProcessGroup and GradBucket are its own.
void bindDdp(pybind11::module_& m);
/// IdMap on tensors, for TorchRec's tables.
void bindIdMap(pybind11::module_& m);

} // namespace pycomm
