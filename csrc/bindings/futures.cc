#include "bindings/futures.h"

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>

#include "c10d/without_gil.h"
#include "engine/operation/issue_context.h"

namespace py = pybind11;

namespace pycomm {
namespace {

/// `with IssueChain(hook, bucket, codec):` what the thread issues meanwhile belongs to one chain, the same on all ranks, and its
/// sums travel as that codec; None: as the group's.
class IssueChain {
 public:
  IssueChain(uint64_t hook, uint32_t bucket, const std::optional<std::string>& codec)
      : context_(
            std::make_shared<IssueContext>(
                IssueContext::Kind::Chain,
                mix64(mix64(hook) + bucket) ^ 0x636861696eULL,
                codec ? codecNamed(*codec) : std::nullopt)) {}

  void enter() {
    scope_ = std::make_unique<IssueScope>(context_);
  }
  void exit() {
    scope_.reset();
  }

 private:
  std::shared_ptr<IssueContext> context_;
  std::unique_ptr<IssueScope> scope_; ///< entered and left on one thread
};

} // namespace

void bindFutures(py::module_& m) {
  py::class_<IssueChain>(m, "IssueChain")
      .def(
          py::init<uint64_t, uint32_t, const std::optional<std::string>&>(),
          py::arg("hook"),
          py::arg("bucket"),
          py::arg("codec") = py::none())
      .def(
          "__enter__",
          [](py::object self) {
            self.cast<IssueChain&>().enter();
            return self;
          })
      .def("__exit__", [](IssueChain& self, const py::args&) { self.exit(); });

  m.def(
      "fail_future",
      [](const std::shared_ptr<torch::jit::PythonFutureWrapper>& future, const py::object& error) {
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
        const std::exception_ptr exception = std::make_exception_ptr(py::error_already_set());
        const WithoutGil no_gil;
        future->fut->setError(exception);
      },
      py::arg("future"),
      py::arg("error"));
}

} // namespace pycomm
