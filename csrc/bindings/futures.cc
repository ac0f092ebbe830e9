#include <c10/util/Logging.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "c10d/call_tag.h"
#include "c10d/future_wait.h"
#include "c10d/named_future.h"
#include "c10d/without_gil.h"
#include "engine/operation/issue_context.h"

namespace py = pybind11;

namespace pycomm {
namespace {

using FutureWrapper = torch::jit::PythonFutureWrapper;

/// `with IssueChain(hook, call, number, group, codec, tag):` what the thread issues meanwhile belongs to one chain, the same on all ranks, and
/// its sums travel as that codec; None: as the group's. `hook` and `call` name the chain; `number` of `group` is what errors call the hook.
/// Ranks compare `tag` with each collective; 0: nothing.
class IssueChain {
 public:
  IssueChain(
      uint64_t hook,
      uint32_t call,
      uint32_t number,
      uint32_t group,
      const std::optional<std::string>& codec,
      uint32_t tag)
      : context_(
            std::make_shared<IssueContext>(
                StrandName{mix64(mix64(hook) + call) ^ 0x636861696eULL, 0, 0},
                originOf(call, number, group),
                StrandTraits{codec ? codecNamed(*codec) : std::nullopt, tag})) {}

  void enter() {
    scope_ = std::make_unique<IssueScope>(context_);
  }
  void exit() {
    scope_.reset();
  }

 private:
  static CallbackOrigin originOf(uint32_t call, uint32_t number, uint32_t group) noexcept {
    CallbackOrigin origin;
    origin.of = CallbackOrigin::Of::Chain;
    origin.hook = number;
    origin.sequence = call;
    origin.group = group;
    return origin;
  }

  std::shared_ptr<IssueContext> context_;
  std::unique_ptr<IssueScope> scope_; ///< entered and left on one thread
};

/// The strand of a callback that the program adds to this future now, and whose pool may run it. Without one: torch's own way.
struct Added {
  std::shared_ptr<IssueContext> context;
  Engine* engine = nullptr;
};

/// `promise`: of a future that the program made; null for others.
std::shared_ptr<FutureName> nameOf(const c10::ivalue::Future& future, const Promise* promise) {
  const std::shared_ptr<FutureName> name = FutureName::of(future);
  return name != nullptr || promise == nullptr ? name : promise->name();
}

Added addTo(const c10::ivalue::Future& future, const Promise* promise) {
  const std::shared_ptr<FutureName> name = nameOf(future, promise);
  return name == nullptr ? Added() : Added{name->addCallback(), name->engine()};
}

/// What torch makes of an exception of a callback. With the interpreter's lock.
std::string textOf(py::error_already_set& error) {
  std::string text = std::string("Got the following error when running the callback: ") + error.what();
  error.restore();
  PyErr_Clear();
  return text;
}

/// torch.futures.Future.then() for a future with a name; null for others.
std::shared_ptr<FutureWrapper> then(
    const std::shared_ptr<FutureWrapper>& future,
    const py::object& callback,
    const Promise* promise) {
  const Added added = addTo(*future->fut, promise);
  if (added.context == nullptr) {
    return nullptr;
  }
  auto function = std::make_shared<torch::jit::PythonFunctionGuard>(callback.cast<py::function>());
  const WithoutGil no_gil;
  const c10::TypePtr value = c10::PyObjectType::get();
  const auto result = future->fut->createInstance(resultOf(*added.context, *future->fut, added.engine, value));
  addNamed(future->fut, added.context, [future, function, result, value] {
    try {
      c10::IValue returned;
      try {
        const WithGil gil;
        returned = torch::jit::toIValue(function->func_(future), value);
      } catch (py::error_already_set& error) {
        const WithGil gil;
        throw std::runtime_error(textOf(error));
      }
      result->markCompleted(std::move(returned));
    } catch (const std::exception&) {
      result->setError(std::current_exception());
    }
    keepIfBroken(*result);
  });
  return std::make_shared<FutureWrapper>(result);
}

/// torch.futures.Future.add_done_callback() for a future with a name; false for others, to which nothing is added.
bool addDoneCallback(const std::shared_ptr<FutureWrapper>& future, const py::object& callback, const Promise* promise) {
  const Added added = addTo(*future->fut, promise);
  if (added.context == nullptr) {
    return false;
  }
  auto function = std::make_shared<torch::jit::PythonFunctionGuard>(callback.cast<py::function>());
  const WithoutGil no_gil;
  addNamed(future->fut, added.context, [future, function] {
    try {
      const WithGil gil;
      function->func_(future);
    } catch (py::error_already_set& error) {
      const WithGil gil;
      LOG(ERROR) << textOf(error);
    } catch (const std::exception& error) {
      LOG(ERROR) << error.what();
    }
  });
  return true;
}

/// `all` is torch's future of all `parts`. The same with a name; null if it has none. `promises`: by part.
std::shared_ptr<FutureWrapper> nameCollected(
    const std::shared_ptr<FutureWrapper>& all,
    const std::vector<std::shared_ptr<FutureWrapper>>& parts,
    const std::vector<const Promise*>& promises) {
  std::vector<std::shared_ptr<FutureName>> names;
  names.reserve(parts.size());
  for (size_t part = 0; part < parts.size(); ++part) {
    names.push_back(nameOf(*parts[part]->fut, promises.at(part)));
  }
  const c10::TypePtr type = collected(names, all->fut->elementType());
  if (type == nullptr) {
    return nullptr;
  }
  auto unwrap = all->unwrap_func; // raises the errors of parts that the program has failed
  c10::intrusive_ptr<c10::ivalue::Future> named;
  {
    const WithoutGil no_gil;
    named = all->fut->then([](c10::ivalue::Future& done) { return done.value(); }, type);
  }
  return std::make_shared<FutureWrapper>(std::move(named), std::move(unwrap));
}

/// Returns when the future has completed. Raises what a signal handler raises meanwhile. A daemon thread that waits for it when the process
/// ends stays here, as in torch's wait it would ask for the interpreter's lock.
void awaitFuture(const std::shared_ptr<FutureWrapper>& future) {
  {
    const WithoutGil no_gil;
    static_cast<void>(awaitCompletion(*future->fut, Deadline::never()));
    future->fut->wait(); // for its streams
  }
  if (const std::shared_ptr<FutureName> name = FutureName::of(*future->fut)) {
    name->noteWaited();
  }
}

} // namespace

void bindFutures(py::module_& m) {
  py::class_<IssueChain>(m, "IssueChain")
      .def(
          py::init<uint64_t, uint32_t, uint32_t, uint32_t, const std::optional<std::string>&, uint32_t>(),
          py::arg("hook"),
          py::arg("call"),
          py::arg("number") = 0,
          py::arg("group") = 0,
          py::arg("codec") = py::none(),
          py::arg("tag") = 0)
      .def(
          "__enter__",
          [](py::object self) {
            self.cast<IssueChain&>().enter();
            return self;
          })
      .def("__exit__", [](IssueChain& self, const py::args&) { self.exit(); });

  py::class_<Promise>(m, "Promise").def(py::init<>()).def("complete", &Promise::complete);

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
  m.def("named_then", &then, py::arg("future"), py::arg("callback"), py::arg("promise"));
  m.def("named_done_callback", &addDoneCallback, py::arg("future"), py::arg("callback"), py::arg("promise"));
  m.def("name_collected", &nameCollected, py::arg("all"), py::arg("parts"), py::arg("promises"));
  m.def("call_tag", &CallTag::current); // of the bucket that a comm hook is called for; 0: there is none
  m.def("await_future", &awaitFuture, py::arg("future"));
}

} // namespace pycomm
