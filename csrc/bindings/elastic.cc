#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "c10d/process_end.h"
#include "c10d/raising.h"
#include "c10d/without_gil.h"
#include "ddp/elastic_steps.h"
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

/// An agreement that Python implements, for tests (rig/elastic_rig.py), with the defaults of StepAgreement: an object with begin(), which returns
/// a bool, end(error), which returns whether to sum again, members(), changes(), three numbers, and close(). Nobody leaves it in order.
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

  bool begin(Round /*round*/) override {
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
  void leave() override {}
  [[nodiscard]] bool hasLeft() const override {
    return false;
  }
  [[nodiscard]] elastic::Changes changes() const override {
    const py::gil_scoped_acquire gil;
    const auto [left, lost, joined] = implementation_.attr("changes")().cast<std::tuple<int, int, int>>();
    return {left, lost, joined};
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

c10::intrusive_ptr<PycommBackend> ours(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto found = c10::dynamic_intrusive_pointer_cast<PycommBackend>(backend);
  if (found == nullptr) {
    throw py::type_error("this backend is not pycomm's");
  }
  return found;
}

// `joins`: handles of members of the group that this process wants to join; none: it is a founding member.
std::shared_ptr<ElasticSteps> stepAgreement(
    const c10::intrusive_ptr<c10d::Backend>& backend,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    size_t min_ranks,
    bool accept_split_brain,
    int quorum_wait_ms,
    int join_pause_ms,
    int join_wait_ms,
    int join_spent_ms,
    std::string description,
    std::string peers_path,
    bool has_port,
    const std::optional<std::vector<std::string>>& joins) {
  auto pycomm = ours(backend);
  const WithoutGil no_gil;
  return raising([&] {
    AgreementDriver::Config config;
    config.min_ranks = min_ranks;
    config.accept_split_brain = accept_split_brain;
    config.quorum_wait_ms = quorum_wait_ms;
    config.join_pause_ms = join_pause_ms;
    config.join_wait_ms = join_wait_ms;
    config.join_spent_ms = join_spent_ms;
    config.description = std::move(description);
    config.peers_path = std::move(peers_path);
    config.has_port = has_port;
    return joins ? ElasticSteps::join(std::move(pycomm), group, *joins, config)
                 : std::make_shared<ElasticSteps>(std::move(pycomm), group, config);
  });
}

// What the first member says that answers, and its handles; or why none does. `whom`: handles, or a FixedPort.
template <typename Whom>
py::object ask(const c10::intrusive_ptr<c10d::Backend>& backend, const Whom& whom, int timeout_ms) {
  const auto pycomm = ours(backend);
  std::string missing;
  const auto notice = [&] {
    const WithoutGil no_gil;
    return raising([&] {
      return AgreementDriver::ask(whom, pycomm->reconfigurable()->visitor(), Deadline::after(timeout_ms), missing);
    });
  }();
  if (!notice) {
    return py::str(missing);
  }
  py::list members;
  for (const MemberHandle& member : notice->members) {
    members.append(member.text());
  }
  return py::make_tuple(notice->description, members);
}

py::object askMembers(
    const c10::intrusive_ptr<c10d::Backend>& backend,
    const std::vector<std::string>& handles,
    int timeout_ms) {
  return ask(backend, handles, timeout_ms);
}

py::object askPort(
    const c10::intrusive_ptr<c10d::Backend>& backend,
    const std::vector<std::string>& hosts,
    uint16_t port,
    int timeout_ms) {
  return ask(backend, FixedPort{hosts, port}, timeout_ms);
}

// All addresses of these hosts, without one for a name that has none.
std::vector<std::string> lookUp(const std::vector<std::string>& hosts, int timeout_ms) {
  const WithoutGil no_gil;
  return raising([&] {
    const FixedPort at{hosts, 0};
    const Deadline deadline = Deadline::after(timeout_ms);
    std::vector<std::string> addresses;
    for (const std::string& host : hosts) {
      for (const SocketAddress& address : at.addressesOf(host, deadline)) {
        addresses.push_back(address.ip());
      }
    }
    return addresses;
  });
}

// This host's network, and by address at which this process is to be found there: why it is not yet, or "". Containers with names of their own
// may share a network, and so its ports. `addresses`: of the hosts on which members are found.
std::pair<std::string, std::vector<std::pair<std::string, std::string>>> offerPort(
    const c10::intrusive_ptr<c10d::Backend>& backend,
    const std::vector<std::string>& addresses,
    uint16_t port) {
  const auto pycomm = ours(backend);
  const WithoutGil no_gil;
  return raising([&] {
    std::vector<std::pair<std::string, std::string>> offers;
    for (const Endpoint::Offer& offer : pycomm->reconfigurable()->offer({addresses, port}, Deadline::after(0))) {
      offers.emplace_back(offer.address.text(), offer.busy);
    }
    HostIdentity host = pycomm->reconfigurable()->visitor().self.host;
    host.hostname.clear();
    return std::make_pair(host.wireText(), offers);
  });
}

py::object pull(ElasticSteps& group) {
  const auto state = [&] {
    const WithoutGil no_gil;
    return raising([&] { return group.pull(); });
  }();
  return state ? py::object(py::bytes(*state)) : py::none();
}

void give(ElasticSteps& group, const py::buffer& state) {
  const py::buffer_info info = state.request();
  const std::string_view bytes(static_cast<const char*>(info.ptr), static_cast<size_t>(info.size * info.itemsize));
  const WithoutGil no_gil;
  raising([&] { group.give(bytes); });
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
          [](StepAgreement& steps) { return raising([&] { return steps.begin(StepAgreement::Round::Step); }); },
          py::call_guard<WithoutGil>())
      .def("end", &end, py::arg("error")) // whether to sum the step again
      .def("members", &StepAgreement::members)
      .def(
          "leave", [](StepAgreement& steps) { raising([&] { steps.leave(); }); }, py::call_guard<WithoutGil>())
      .def("has_left", [](const StepAgreement& steps) { return raising([&] { return steps.hasLeft(); }); })
      .def("is_over", [](const StepAgreement& steps) { return raising([&] { return steps.isOver(); }); })
      .def(
          "changes",
          [](const StepAgreement& steps) {
            const elastic::Changes changes = steps.changes();
            return std::tuple(changes.left, changes.lost, changes.joined);
          })
      .def("close", [](StepAgreement& steps) { steps.close(); }, py::call_guard<WithoutGil>());
  py::class_<ElasticSteps, StepAgreement, std::shared_ptr<ElasticSteps>>(m, "ElasticSteps")
      .def("pull", &pull)
      .def(
          "loaded", [](ElasticSteps& group) { raising([&] { group.loaded(); }); }, py::call_guard<WithoutGil>())
      .def("steps", [](ElasticSteps& group) { return raising([&] { return group.steps(); }); })
      .def(
          "ranks_with_newcomers",
          [](const ElasticSteps& group) { return raising([&] { return group.ranksWithNewcomers(); }); })
      .def("give", &give, py::arg("state"))
      .def(
          "refuse",
          [](ElasticSteps& group, const std::string& why, size_t keep) { raising([&] { group.refuse(why, keep); }); },
          py::arg("why"),
          py::arg("keep") = 0,
          py::call_guard<WithoutGil>());
  m.def(
      "step_agreement",
      &stepAgreement,
      py::arg("backend"),
      py::arg("group"),
      py::arg("min_ranks"),
      py::arg("accept_split_brain"),
      py::arg("quorum_wait_ms"),
      py::arg("join_pause_ms") = 10000,
      py::arg("join_wait_ms") = 60000,
      py::arg("join_spent_ms") = 0,
      py::arg("description") = "",
      py::arg("peers_path") = "",
      py::arg("has_port") = false,
      py::arg("joins") = py::none());
  m.def("ask_members", &askMembers, py::arg("backend"), py::arg("handles"), py::arg("timeout_ms"));
  m.def("ask_port", &askPort, py::arg("backend"), py::arg("hosts"), py::arg("port"), py::arg("timeout_ms"));
  m.def("look_up", &lookUp, py::arg("hosts"), py::arg("timeout_ms"));
  m.def("offer_port", &offerPort, py::arg("backend"), py::arg("addresses"), py::arg("port"));
}

} // namespace pycomm
