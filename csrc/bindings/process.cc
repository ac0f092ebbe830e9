#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/fault_point.h"
#include "base/log.h"
#include "base/wait_point.h"
#include "bindings/bindings.h"
#include "c10d/cuda_devices.h"
#include "c10d/process_engine.h"
#include "c10d/python_errors.h"
#include "c10d/raising.h"
#include "c10d/shared_tensors.h"
#include "c10d/without_gil.h"
#include "numeric/simd_level.h"
#include "transport/net/host_identity.h"
#include "transport/net/interfaces.h"
#include "transport/net/select_address.h"

namespace py = pybind11;

namespace pycomm {
namespace {

/// What CUDA devices and NCCL get to end what is under way, when the process ends.
constexpr int64_t kCudaEndMs = 1000;

// Never freed: native threads may log until the process ends.
py::object& logCallback() {
  static py::object* callback = new py::object();
  return *callback;
}

const char* levelName(LogLevel level) {
  switch (level) {
    case LogLevel::Trace:
      return "TRACE";
    case LogLevel::Info:
      return "INFO";
    case LogLevel::Warn:
    case LogLevel::Off:
      break;
  }
  return "WARN";
}

// Lines come from data loops, which never wait for the interpreter: a callback thread carries them there.
void passOn(LogLevel level, const char* line) {
  try {
    processEngine().callbacks().submit([level, text = std::string(line)] {
      const py::gil_scoped_acquire lock;
      try {
        if (const py::object callback = logCallback(); callback && !callback.is_none()) {
          callback(levelName(level), text);
        }
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("pycomm's log callback");
      }
    });
  } catch (const std::exception&) { // no memory, or no engine any more: log() does not throw
  }
}

void setLogCallback(const py::object& callback, const std::string& level) {
  logCallback() = callback;
  const LogLevel minimum = level == "TRACE" ? LogLevel::Trace : (level == "INFO" ? LogLevel::Info : LogLevel::Warn);
  setLogSink(callback.is_none() ? nullptr : passOn, minimum);
}

py::list interfaces() {
  py::list list;
  for (const Interface& interface : listInterfaces()) {
    for (const SocketAddress& address : interface.addresses) {
      py::dict entry;
      entry["name"] = interface.name;
      entry["address"] = address.ip();
      entry["family"] = addressFamilyName(address.family());
      entry["loopback"] = interface.loopback;
      list.append(entry);
    }
  }
  return list;
}

/// The address that this process would bind. If `everyone` is empty: its first guess, which a rank would report to the others.
py::dict chooseAddressOf(
    const std::string& interface,
    const std::string& family,
    const std::string& store_host,
    const std::vector<std::pair<std::string, std::string>>& everyone,
    size_t rank) {
  const AddressChoice choice = raising([&] {
    const WithoutGil no_gil; // names are looked up
    AddressPolicy policy;
    policy.spec = InterfaceSpec::parse(interface);
    policy.family =
        family == "ipv4" ? AddressFamily::IPv4 : (family == "ipv6" ? AddressFamily::IPv6 : AddressFamily::Any);
    policy.store_host = store_host;
    std::vector<RankRoute> routes;
    for (const auto& [identity, route] : everyone) {
      routes.push_back(
          {HostIdentity::fromWireText(identity).value_or(HostIdentity()),
           SocketAddress::tryParse(route, 0).value_or(SocketAddress())});
    }
    const HostNetwork network = HostNetwork::ofThisHost();
    return rank < routes.size() ? chooseAddress(policy, network, routes, rank) : chooseRoute(policy, network);
  });
  py::dict chosen;
  chosen["address"] = choice.address.ip();
  chosen["interface"] = choice.interface_name;
  chosen["why"] = choice.why;
  return chosen;
}

py::list faultPoints() {
  py::list list;
  for (const FaultPointTally& tally : faultPointTallies()) {
    list.append(py::make_tuple(tally.point, tally.visits, tally.strikes));
  }
  return list;
}

py::dict buildInfo() {
  py::dict info;
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#elif defined(__GNUC__)
  info["compiler"] = "gcc " __VERSION__;
#else
  info["compiler"] = "unknown";
#endif
  info["cxx_standard"] = std::to_string(__cplusplus / 100 % 100);
  return info;
}

// What waits do in a test build: see beforeWait().
struct Watch {
  std::atomic<int64_t> waits{0};
  std::atomic<int64_t> with_gil{0};
  std::atomic<int64_t> with_mutex{0};
  py::object handler; ///< guarded by the interpreter's lock, as is the next
  py::list errors;
};

// Never freed, as threads may wait until the process ends.
Watch& watch() {
  static Watch* const made = new Watch();
  return *made;
}

thread_local bool t_handles = false;

/// As Python runs a signal handler: on the main thread, wherever that is.
void observeWait() noexcept {
  Watch& seen = watch();
  ++seen.waits;
  const bool usable = interpreterIsUsable();
  const bool with_gil = usable && PyGILState_Check() != 0;
  seen.with_gil += with_gil ? 1 : 0;
  seen.with_mutex += LeafMutex::heldHere() ? 1 : 0;
  if (with_gil || !usable || !onMainThread() || std::exchange(t_handles, true)) {
    return;
  }
  const py::gil_scoped_acquire gil;
  try {
    seen.handler();
  } catch (py::error_already_set& error) {
    seen.errors.append(error.value());
  }
  t_handles = false;
}

/// From now on `handler()` runs at each wait of the main thread, and each wait is counted.
void watchWaits(py::object handler) {
  watch().handler = std::move(handler);
  observeWaits(&observeWait);
}

/// (waits, those with the interpreter's lock, those with a mutex, exceptions of the handler). Nothing is watched any more.
py::tuple watchedWaits() {
  observeWaits(nullptr);
  Watch& seen = watch();
  return py::make_tuple(seen.waits.load(), seen.with_gil.load(), seen.with_mutex.load(), seen.errors);
}

} // namespace

void bindProcess(py::module_& m) {
  m.def("set_exception_types", [](const py::dict& types) { setExceptionTypes(types.ptr()); }, py::arg("types"));
  m.def("set_log_callback", &setLogCallback, py::arg("callback"), py::arg("level"));
  m.def("begin_process_end", &beginProcessEnd);
  m.def(
      "shutdown_all",
      [](int64_t timeout_ms) {
        const Deadline deadline = Deadline::after(timeout_ms);
        // While there is an engine that they can tell. Only the first call has anything to do here, and takes its own time for it.
        CudaDevices::stopAllThreads(Deadline::after(kCudaEndMs));
        const bool ended = shutdownProcessEngine(deadline);
        if (ended) {
          setLogSink(nullptr, LogLevel::Off); // last: the line about a failure's record may come at exit
        }
        return ended;
      },
      py::arg("timeout_ms"),
      py::call_guard<WithoutGil>());
  m.def("arm_fault_points", [](const std::string& spec) { raising([&] { armFaultPoints(spec); }); }, py::arg("spec"));
  if (faultPointsBuiltIn()) {
    m.def("fault_points", &faultPoints); // (point, visits, strikes) of each that is armed
    m.def("watch_waits", &watchWaits, py::arg("handler"));
    m.def("watched_waits", &watchedWaits);
  }
  m.def(
      "empty_shared",
      [](const std::vector<int64_t>& sizes, at::ScalarType dtype) {
        return raising([&] { return emptyShared(sizes, dtype); });
      },
      py::arg("sizes"),
      py::arg("dtype"),
      py::call_guard<WithoutGil>()); // making pages takes a while
  m.def("list_interfaces", &interfaces);
  m.def(
      "choose_address",
      &chooseAddressOf,
      py::arg("interface"),
      py::arg("family"),
      py::arg("store_host"),
      py::arg("everyone"),
      py::arg("rank"));
  m.def("host_identity", [] { return HostIdentity::ofThisProcess().wireText(); });
  m.def("simd_level", [] { return std::string(simdLevelName(simdLevel())); });
  m.def("build_info", &buildInfo);
}

} // namespace pycomm
