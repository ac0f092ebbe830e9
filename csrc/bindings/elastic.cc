#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "c10d/process_end.h"
#include "c10d/raising.h"
#include "c10d/without_gil.h"
#include "ddp/elastic_group.h"
#include "ddp/step_agreement.h"

namespace py = pybind11;

namespace pycomm {
namespace {

/// The exception as an object of Python's, or None.
py::object objectOf(const std::exception_ptr& error) {
  try {
    if (error != nullptr) {
      std::rethrow_exception(error);
    }
    return py::none();
  } catch (const py::error_already_set& python) {
    return python.value();
  } catch (const std::exception& other) {
    return py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(other.what());
  }
}

/// An agreement that Python implements: an object with begin(), which returns a bool, end(error), which returns whether to sum again,
/// members() and close().
class PythonAgreement final : public StepAgreement {
 public:
  explicit PythonAgreement(py::object implementation) : implementation_(std::move(implementation)) {}
  ~PythonAgreement() override {
    if (mayTakeGil()) {
      const py::gil_scoped_acquire gil;
      implementation_ = py::object();
    } else {
      (void)implementation_.release();
    }
  }
  PythonAgreement(const PythonAgreement&) = delete;
  PythonAgreement& operator=(const PythonAgreement&) = delete;

  bool begin() override {
    const py::gil_scoped_acquire gil;
    return implementation_.attr("begin")().cast<bool>();
  }
  Outcome end(const std::exception_ptr& error) override {
    const py::gil_scoped_acquire gil;
    return implementation_.attr("end")(objectOf(error)).cast<bool>() ? Outcome::Redo : Outcome::Commit;
  }
  [[nodiscard]] std::vector<int> members() const override {
    const py::gil_scoped_acquire gil;
    return implementation_.attr("members")().cast<std::vector<int>>();
  }
  void close() noexcept override {
    if (!mayTakeGil()) {
      return;
    }
    const py::gil_scoped_acquire gil;
    try {
      implementation_.attr("close")();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("StepAgreement.close");
    }
  }

 private:
  py::object implementation_;
};

/// A Python exception as C++ carries it.
std::exception_ptr carried(const py::object& error) {
  if (error.is_none()) {
    return nullptr;
  }
  PyErr_SetObject(py::type::of(error).ptr(), error.ptr());
  return std::make_exception_ptr(py::error_already_set());
}

bool end(StepAgreement& steps, const py::object& error) {
  const std::exception_ptr raised = carried(error);
  const WithoutGil no_gil;
  return raising([&] { return steps.end(raised) == StepAgreement::Outcome::Redo; });
}

std::shared_ptr<StepAgreement> open(
    const c10::intrusive_ptr<c10d::Backend>& backend,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    size_t min_ranks,
    bool accept_split_brain,
    int quorum_wait_ms) {
  auto ours = c10::dynamic_intrusive_pointer_cast<PycommBackend>(backend);
  if (ours == nullptr) {
    throw py::type_error("this backend is not pycomm's");
  }
  const WithoutGil no_gil;
  return raising([&]() -> std::shared_ptr<StepAgreement> {
    AgreementDriver::Config config;
    config.min_ranks = min_ranks;
    config.accept_split_brain = accept_split_brain;
    config.quorum_wait_ms = quorum_wait_ms;
    return std::make_shared<ElasticGroup>(std::move(ours), group, config);
  });
}

} // namespace

void bindElastic(py::module_& m) {
  py::class_<StepAgreement, std::shared_ptr<StepAgreement>>(m, "StepAgreement")
      .def(
          py::init([](py::object implementation) -> std::shared_ptr<StepAgreement> {
            return std::make_shared<PythonAgreement>(std::move(implementation));
          }),
          py::arg("implementation"))
      .def(
          "begin",
          [](StepAgreement& steps) { return raising([&] { return steps.begin(); }); },
          py::call_guard<WithoutGil>())
      .def("end", &end, py::arg("error")) // whether to sum the step again
      .def("members", &StepAgreement::members)
      .def("close", [](StepAgreement& steps) { steps.close(); }, py::call_guard<WithoutGil>());
  m.def(
      "step_agreement",
      &open,
      py::arg("backend"),
      py::arg("group"),
      py::arg("min_ranks"),
      py::arg("accept_split_brain"),
      py::arg("quorum_wait_ms"));
}

} // namespace pycomm
