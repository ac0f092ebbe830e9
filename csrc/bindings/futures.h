#pragma once

namespace pybind11 {
class module_;
}

namespace pycomm {

/// Adds IssueChain, fail_future, and what pycomm/_native/callback_names.py calls for torch's futures.
void bindFutures(pybind11::module_& m);

} // namespace pycomm
