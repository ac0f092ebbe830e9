#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "bindings/bindings.h"
#include "c10d/backend.h"
#include "c10d/process_engine.h"
#include "c10d/raising.h"
#include "c10d/record_dict.h"
#include "c10d/store_adapter.h"
#include "c10d/torch_compat.h"
#include "c10d/without_gil.h"
#include "schedule/select.h"
#include "schedule/step.h"
#include "transport/rendezvous/sealed_store.h"
#include "transport/secure/secret.h"
#include "transport/secure/tls_context.h"

namespace py = pybind11;

namespace pycomm {
namespace {

constexpr int kRefusalMs = 2000; // to find out which of the groups of that name it is

/// What pycomm._group.native_options.native_options makes, read while the lock is held.
struct NativeOptions {
  std::string interface;
  std::string socket_family;
  std::string algorithm;
  std::string transport;
  std::string store_host;
  std::string wire_dtype;
  std::string cuda_mode;
  std::string cuda_library;
  int port_first = 0;
  int port_last = 0;
  int64_t segment_nbytes = 0;
  int heartbeat_timeout_ms = 3000;
  int64_t flight_slots = 0;
  std::string flight_dump_prefix;
  std::vector<int> global_ranks;
  std::vector<std::string> nccl_libraries;
  std::string nccl_host_id;
  std::string why_no_nccl; ///< empty: this rank may
  bool check_call_sites = false;
  bool launcher_restarts = false;
  std::string launcher_life;
  bool enable_reconfigure = false;
  std::string known_address; ///< of one that can be reconfigured: see Reconfigurable
  std::vector<std::string> skipped_folders;
  std::string security;
  std::shared_ptr<const Secret> secret;
  std::string secret_origin;

  explicit NativeOptions(const py::dict& options)
      : interface(options["interface"].cast<std::string>()),
        socket_family(options["socket_family"].cast<std::string>()),
        algorithm(options["algorithm"].cast<std::string>()),
        transport(options["transport"].cast<std::string>()),
        store_host(options["store_host"].cast<std::string>()),
        wire_dtype(options["wire_dtype"].cast<std::string>()),
        cuda_mode(options["cuda_mode"].cast<std::string>()),
        cuda_library(options["cuda_library"].cast<std::string>()),
        port_first(options["port_first"].cast<int>()),
        port_last(options["port_last"].cast<int>()),
        segment_nbytes(options["segment_nbytes"].cast<int64_t>()),
        heartbeat_timeout_ms(options["heartbeat_timeout_ms"].cast<int>()),
        flight_slots(options["flight_recorder_size"].cast<int64_t>()),
        flight_dump_prefix(options["flight_recorder_prefix"].cast<std::string>()),
        global_ranks(options["global_ranks"].cast<std::vector<int>>()),
        nccl_libraries(options["nccl_libraries"].cast<std::vector<std::string>>()),
        nccl_host_id(options["nccl_host_id"].cast<std::string>()),
        why_no_nccl(options["why_no_nccl"].cast<std::string>()),
        check_call_sites(options["check_call_sites"].cast<bool>()),
        launcher_restarts(options["launcher_restarts"].cast<bool>()),
        launcher_life(options["launcher_life"].cast<std::string>()),
        enable_reconfigure(options["enable_reconfigure"].cast<bool>()),
        known_address(options["known_address"].cast<std::string>()),
        skipped_folders(options["skipped_folders"].cast<std::vector<std::string>>()),
        security(options["security"].cast<std::string>()),
        secret(options["secret"].cast<std::shared_ptr<Secret>>()), // null for None
        secret_origin(options["secret_origin"].cast<std::string>()) {}
};

Algorithm allReduceAlgorithm(const std::string& name) {
  const auto algorithm = algorithmNamed(name);
  if (!algorithm || (*algorithm != Algorithm::Auto && !hasAlgorithm(Collective::AllReduce, *algorithm))) {
    throw Error(ErrorCode::InvalidArgument, "algorithm=" + name + " is not an algorithm for all_reduce.", "auto");
  }
  return *algorithm;
}

Transport transportNamed(const std::string& name) {
  return name == "tcp" ? Transport::Tcp : (name == "shm" ? Transport::SharedMemory : Transport::Auto);
}

Codec codecOf(const std::string& wire_dtype) {
  const auto codec = codecNamed(wire_dtype);
  if (!codec) {
    throw Error(ErrorCode::InvalidArgument, "wire_dtype=" + wire_dtype + " is not a codec.", "fp32");
  }
  return *codec;
}

SecurityPolicy policyNamed(const std::string& name) {
  return name == "off" ? SecurityPolicy::Off : (name == "require" ? SecurityPolicy::Require : SecurityPolicy::Auto);
}

/// torch's store, with a seal on every value if there is a secret.
struct SealedAdapter {
  SealedAdapter(std::shared_ptr<Store> adapter, const Secret& secret, const JobRanks& job)
      : inner(std::move(adapter)), sealed(*inner, secret, job) {}

  std::shared_ptr<Store> inner;
  SealedStore sealed;
};

/// torch's TCPStore without a launcher that keeps it: it ends with rank 0's process.
bool servesStore(int job_rank, const std::string& store_host, bool launcher_restarts) {
  return job_rank == 0 && !store_host.empty() && !launcher_restarts;
}

std::shared_ptr<Store> storeOf(
    const c10::intrusive_ptr<c10d::Store>& store,
    const Secret* secret,
    const JobRanks& job) {
  auto adapter = std::make_shared<StoreAdapter>(store);
  if (secret == nullptr) {
    return adapter;
  }
  const auto both = std::make_shared<SealedAdapter>(std::move(adapter), *secret, job);
  return {both, &both->sealed};
}

AddressFamily familyNamed(const std::string& name) {
  return name == "ipv4" ? AddressFamily::IPv4 : (name == "ipv6" ? AddressFamily::IPv6 : AddressFamily::Any);
}

uint32_t digestOf(const std::string& text) { // FNV-1a
  uint32_t hash = 2166136261U;
  for (const char c : text) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 16777619U;
  }
  return hash;
}

// Every rank says what its CUDA tensors could use, also a rank that will never have one, so that all choose the same.
CudaDevices::Config cudaConfig(const NativeOptions& options, const Group& group) {
  CudaDevices::Config config;
  config.library = options.cuda_library;
  config.nccl_libraries = options.nccl_libraries;
  if (options.cuda_mode == "host") {
    return config;
  }
  config.must_use_nccl = options.cuda_mode == "nccl";
  if (config.must_use_nccl) { // else the host is the better way for ranks that share a GPU
    config.nccl_host_id = options.nccl_host_id;
  }
  const bool bare = group.identity().tls != nullptr && group.topology().hosts() > 1;
  if (bare && !config.must_use_nccl) {
    log(LogLevel::Info, group.identity().text() + ": CUDA tensors do not use NCCL, which would send them in plain");
    return config;
  }
  if (bare && options.security == "require") {
    throw Error(
        ErrorCode::InvalidArgument,
        "PYCOMM_SECURITY=require, but cuda_mode=nccl sends CUDA tensors in plain from host to host.",
        "cuda_mode='auto', which sends them through the host's memory and TLS");
  }
  if (bare && group.identity().rank == 0) {
    log(LogLevel::Warn,
        group.identity().text() +
            ": with cuda_mode=nccl, CUDA tensors travel in plain from host to host although there is a secret. Try: "
            "PYCOMM_CUDA_MODE=auto");
  }
  const std::vector<std::string>& whys = group.remarks();
  const auto no = std::find_if(whys.begin(), whys.end(), [](const std::string& why) { return !why.empty(); });
  config.may_use_nccl = no == whys.end();
  if (config.must_use_nccl && !config.may_use_nccl) {
    throw Error(
        ErrorCode::Unsupported,
        "cuda_mode=nccl, but " + group.identity().job.text(static_cast<int>(no - whys.begin())) + " " + *no + ".",
        "use cuda_mode='auto', which falls back to pinned memory of the host");
  }
  return config;
}

c10::intrusive_ptr<c10d::Backend> createBackend(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    const std::string& group_name,
    int64_t timeout_ms,
    const py::dict& dict,
    std::optional<bool> starts_world) {
  const NativeOptions options(dict);
  const WithoutGil no_gil;
  return raising([&]() -> c10::intrusive_ptr<c10d::Backend> {
    PycommBackend::Settings settings;
    settings.starts_world = starts_world;
    settings.timeout = std::chrono::milliseconds(timeout_ms);
    settings.algorithm = allReduceAlgorithm(options.algorithm);
    settings.segment_nbytes = options.segment_nbytes;
    settings.codec = codecOf(options.wire_dtype);
    settings.check_call_sites = options.check_call_sites;
    settings.skipped_folders = options.skipped_folders;

    Group::Config config;
    RendezvousConfig& rendezvous = config.rendezvous;
    rendezvous.rank = rank;
    rendezvous.size = size;
    rendezvous.job = JobRanks(options.global_ranks); // none: the default group, whose ranks are the job's
    rendezvous.group_name = group_name;
    rendezvous.store_host = options.store_host;
    rendezvous.spec = InterfaceSpec::parse(options.interface);
    rendezvous.family = familyNamed(options.socket_family);
    rendezvous.ports = {static_cast<uint16_t>(options.port_first), static_cast<uint16_t>(options.port_last)};
    rendezvous.config_text = "algorithm=" + options.algorithm + " transport=" + options.transport +
        " segment_nbytes=" + std::to_string(options.segment_nbytes) + " wire_dtype=" + options.wire_dtype +
        " cuda_mode=" + options.cuda_mode + " heartbeat_timeout=" + std::to_string(options.heartbeat_timeout_ms) +
        "ms" + (options.check_call_sites ? " check_call_sites=1" : "") + " security=" + options.security;
    rendezvous.config_digest = digestOf(rendezvous.config_text);
    rendezvous.remark = options.why_no_nccl;
    rendezvous.takeover = options.launcher_restarts ? Takeover::FromEndedRun : Takeover::Never;
    rendezvous.life = options.launcher_life;
    rendezvous.serves_store = servesStore(rendezvous.job.of(rank), options.store_host, options.launcher_restarts);
    rendezvous.deadline = Deadline::after(timeout_ms);

    config.security.policy = policyNamed(options.security);
    config.security.secret = options.secret;
    config.security.secret_origin = options.secret_origin;
    config.transport = transportNamed(options.transport);
    config.dead_after_ms = options.heartbeat_timeout_ms;
    config.flight_slots = static_cast<size_t>(options.flight_slots);
    config.flight_dump_prefix = options.flight_dump_prefix;

    settings.group_name = group_name;
    settings.cuda = [options](const Group& group) { return cudaConfig(options, group); };
    if (options.enable_reconfigure) {
      const SocketAddress known = SocketAddress::tryParse(options.known_address, 0).value_or(SocketAddress());
      auto members = std::make_unique<Reconfigurable>(processEngine(), std::move(config), known);
      return c10::make_intrusive<PycommBackend>(rank, size, std::move(members), std::move(settings));
    }
    const std::shared_ptr<Store> meeting_place = storeOf(store, options.secret.get(), rendezvous.job);
    const std::shared_ptr<Group> group = joinGroup(*meeting_place, config);
    return c10::make_intrusive<PycommBackend>(meeting_place, group, std::move(settings));
  });
}

/// The ranks that wait for this one in a group learn why it does not come (refuseToJoin).
void refuse(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    const std::string& group_name,
    const std::string& reason,
    const std::string& store_host,
    const std::vector<int>& global_ranks,
    bool launcher_restarts,
    const std::shared_ptr<Secret>& secret) {
  const WithoutGil no_gil;
  raising([&] {
    RendezvousConfig config;
    config.rank = rank;
    config.size = size;
    config.job = JobRanks(global_ranks);
    config.group_name = group_name;
    config.takeover = launcher_restarts ? Takeover::FromEndedRun : Takeover::Never;
    config.serves_store = servesStore(config.job.of(rank), store_host, launcher_restarts);
    config.deadline = Deadline::after(kRefusalMs);
    refuseToJoin(*storeOf(store, secret.get(), config.job), config, reason);
  });
}

PycommBackend& asPycomm(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto* ours = dynamic_cast<PycommBackend*>(backend.get());
  if (ours == nullptr) {
    throw py::type_error("this backend is not pycomm's");
  }
  return *ours;
}

/// For one call. Raises if it has none: before reconfigure().
std::shared_ptr<Group> groupOf(const c10::intrusive_ptr<c10d::Backend>& backend) {
  return raising([&] { return asPycomm(backend).group(); });
}

std::string describe(const Group& group) {
  const GroupIdentity& identity = group.identity();
  if (identity.size == 1) {
    return "1 rank, without connections";
  }
  const bool within_host = !identity.hasPorts();
  std::string links = within_host
      ? "Unix sockets"
      : "TCP on " + group.interfaceName() + " (" + identity.local_address.ip() + "; " + group.addressReason() + ")";
  if (identity.tls != nullptr) {
    links += (within_host ? ", with" : ", TLS with") + (" the secret of key id " + identity.tls->secret().keyId());
  }
  const std::string ranks = std::to_string(identity.size) + " ranks over ";
  if (group.sharesMemory()) {
    return ranks + "shared memory, and " + links;
  }
  return ranks + links + (group.whyNotShared().empty() ? "" : "; no shared memory: " + group.whyNotShared());
}

} // namespace

void bindBackend(py::module_& m) {
  m.def(
      "create_backend",
      &createBackend,
      py::arg("store"),
      py::arg("rank"),
      py::arg("size"),
      py::arg("group_name"),
      py::arg("timeout_ms"),
      py::arg("options"),
      py::arg("starts_world"));
  m.def(
      "refuse_to_join",
      &refuse,
      py::arg("store"),
      py::arg("rank"),
      py::arg("size"),
      py::arg("group_name"),
      py::arg("reason"),
      py::arg("store_host"),
      py::arg("global_ranks"),
      py::arg("launcher_restarts"),
      py::arg("secret"),
      py::call_guard<WithoutGil>());
  m.def(
      "last_error",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) -> py::object {
        const std::shared_ptr<Group> group = asPycomm(backend).groupIfAny();
        const auto failure = group == nullptr ? std::nullopt : group->failure();
        return failure ? py::object(recordDict(*failure)) : py::none();
      },
      py::arg("backend"));
  m.def(
      "backend_error",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) { return asPycomm(backend).getError(); },
      py::arg("backend"));
  m.def(
      "flight_record",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) {
        const std::shared_ptr<Group> group = groupOf(backend);
        const WithoutGil no_gil;
        return group->engine().recorder().json(&group->flightLog());
      },
      py::arg("backend"));
  m.def(
      "write_flight_record",
      [](const std::string& path) { raising([&] { processEngine().recorder().write(path); }); },
      py::arg("path"),
      py::call_guard<WithoutGil>());
  m.def(
      "held_text", // for tests
      [](const c10::intrusive_ptr<c10d::Backend>& backend) {
        const std::shared_ptr<Group> group = asPycomm(backend).groupIfAny();
        return group == nullptr ? std::string() : heldText(group->usage());
      },
      py::arg("backend"),
      py::call_guard<WithoutGil>());
  m.def(
      "codec_stats",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) {
        const std::shared_ptr<Group> group = groupOf(backend);
        const CodecCounters& counters = group->codecCounters();
        py::dict stats;
        stats["elements_sent"] = counters.sent_numel.load();
        stats["bytes_sent"] = counters.sent_nbytes.load();
        stats["bytes_saved"] = counters.saved_nbytes.load();
        stats["overflows"] = counters.overflows.load();
        return stats;
      },
      py::arg("backend"));
  m.def(
      "all_reduce_as",
      [](const c10::intrusive_ptr<c10d::Backend>& backend,
         const at::Tensor& tensor,
         const std::string& codec,
         const std::optional<at::Tensor>& residual,
         const c10d::ReduceOp& op,
         bool async_op) {
        c10d::AllreduceOptions options;
        options.reduceOp = op;
        options.asyncOp = async_op;
        const Codec chosen = raising([&] { return codecOf(codec); });
        return asPycomm(backend).allreduceAs(chosen, {tensor}, residual.value_or(at::Tensor()), options);
      },
      py::arg("backend"),
      py::arg("tensor"),
      py::arg("codec"),
      py::arg("residual"),
      py::arg("op"),
      py::arg("async_op"),
      py::call_guard<WithoutGil>());
  m.def(
      "goes_by_nccl",
      [](const c10::intrusive_ptr<c10d::Backend>& backend, at::Device device) {
        return asPycomm(backend).goesByNccl(device);
      },
      py::arg("backend"),
      py::arg("device"),
      py::call_guard<WithoutGil>()); // it may wait for the other ranks
  m.def(
      "is_reconfigurable",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) { return asPycomm(backend).isReconfigurable(); },
      py::arg("backend"));
  m.def(
      "reconfigure_handle",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) { return asPycomm(backend).reconfigureHandle(); },
      py::arg("backend"));
  m.def(
      "reconfigure", // for torch without such a call of its own
      [](const c10::intrusive_ptr<c10d::Backend>& backend,
         const c10::intrusive_ptr<c10d::ProcessGroup>& group,
         int64_t uuid,
         const std::vector<std::string>& handles,
         std::optional<int64_t> timeout_ms) {
        PycommBackend& ours = asPycomm(backend);
        ours.reconfigureTo(uuid, handles, timeout_ms ? std::chrono::milliseconds(*timeout_ms) : ours.timeout());
#ifndef C10D_BACKEND_HAS_RECONFIGURE
        NumbersOfProcessGroup::set(*group, ours.getRank(), ours.getSize());
#endif
      },
      py::arg("backend"),
      py::arg("group"),
      py::arg("uuid"),
      py::arg("handles"),
      py::arg("timeout_ms"),
      py::call_guard<WithoutGil>());
  m.def(
      "register_abort_hook",
      [](const c10::intrusive_ptr<c10d::Backend>& backend, int64_t id, std::function<void()> hook) {
        asPycomm(backend).addAbortHook(id, std::move(hook));
      },
      py::arg("backend"),
      py::arg("hook_id"),
      py::arg("hook"));
  m.def(
      "unregister_abort_hook",
      [](const c10::intrusive_ptr<c10d::Backend>& backend, int64_t id) { asPycomm(backend).removeAbortHook(id); },
      py::arg("backend"),
      py::arg("hook_id"));
  m.def(
      "job_ranks", // of the group's members, in order
      [](const c10::intrusive_ptr<c10d::Backend>& backend) {
        const std::shared_ptr<Group> group = groupOf(backend);
        const GroupIdentity& identity = group->identity();
        std::vector<int> ranks;
        for (int rank = 0; rank < identity.size; ++rank) {
          ranks.push_back(identity.job.of(rank));
        }
        return ranks;
      },
      py::arg("backend"));
  m.def(
      "group_number",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) {
        return raising([&] { return asPycomm(backend).groupNumber(); });
      },
      py::arg("backend"));
  m.def(
      "group_run",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) { return groupOf(backend)->identity().run; },
      py::arg("backend"));
  m.def(
      "group_seal",
      [](const c10::intrusive_ptr<c10d::Backend>& backend, const std::string& key, const std::string& value) {
        const std::shared_ptr<Group> group = groupOf(backend);
        const GroupIdentity& identity = group->identity();
        return raising(
            [&] { return identity.tls == nullptr ? value : Seal(identity.tls->secret()).sealed(key, value); });
      },
      py::arg("backend"),
      py::arg("key"),
      py::arg("value"));
  m.def(
      "group_open",
      [](const c10::intrusive_ptr<c10d::Backend>& backend, const std::string& key, const std::string& text) {
        const std::shared_ptr<Group> group = groupOf(backend);
        const GroupIdentity& identity = group->identity();
        return raising([&] {
          if (identity.tls != nullptr) {
            return Seal(identity.tls->secret(), identity.job).opened(key, text);
          }
          refuseSealed(key, text, identity.job);
          return text;
        });
      },
      py::arg("backend"),
      py::arg("key"),
      py::arg("text"));
  m.def(
      "rank_hosts",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) { return groupOf(backend)->identity().hosts; },
      py::arg("backend"));
  m.def(
      "group_address", // at which other hosts reach this rank, or ""
      [](const c10::intrusive_ptr<c10d::Backend>& backend) {
        return groupOf(backend)->identity().addressForOthers().ip();
      },
      py::arg("backend"));
  m.def(
      "topology_text",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) { return groupOf(backend)->topology().text(); },
      py::arg("backend"));
  m.def(
      "describe_backend",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) { return describe(*groupOf(backend)); },
      py::arg("backend"));
}

} // namespace pycomm
