#pragma once

namespace pybind11 {
class module_;
}

namespace pycomm {

/// Adds IssueChain and fail_future.
void bindFutures(pybind11::module_& m);

} // namespace pycomm
