#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/codec.h"
#include "bindings/bindings.h"
#include "c10d/raising.h"
#include "c10d/without_gil.h"
#include "ddp/reducer.h"
#include "ddp/step_agreement.h"
#include "ddp/steps.h"

namespace py = pybind11;

namespace pycomm {
namespace {

/// A function for Python that calls `function` without the interpreter's lock. pycomm's errors leave it as Python exceptions, as torch's do. In
/// place of torch::wrap_pybind_function_no_gil, which does not know of the end of the process: see WithoutGil.
template <typename Result, typename... Args>
auto blocking(Result (*function)(Reducer&, Args...)) {
  return torch::wrap_pybind_function([function](Reducer& reducer, Args... args) {
    const WithoutGil no_gil;
    return raising([&] { return function(reducer, std::forward<Args>(args)...); });
  });
}
template <typename Class, typename Result, typename... Args>
auto blocking(Result (Class::*method)(Args...)) {
  return torch::wrap_pybind_function([method](Class& self, Args... args) {
    const WithoutGil no_gil;
    return raising([&] { return (self.*method)(std::forward<Args>(args)...); });
  });
}
template <typename Class, typename Result, typename... Args>
auto blocking(Result (Class::*method)(Args...) const) {
  return torch::wrap_pybind_function([method](const Class& self, Args... args) {
    const WithoutGil no_gil;
    return raising([&] { return (self.*method)(std::forward<Args>(args)...); });
  });
}

using ReducerClass = py::class_<Reducer, std::shared_ptr<Reducer>>;

/// What a bucket is cast to, and what that is encoded as.
std::pair<std::optional<at::ScalarType>, Codec> wireOf(const std::optional<std::string>& wire) {
  if (!wire) {
    return {std::nullopt, Codec::None};
  }
  const std::optional<Codec> named = codecNamed(*wire);
  TORCH_CHECK_VALUE(named.has_value(), "no wire dtype: ", *wire);
  switch (*named) {
    case Codec::None:
      return {at::kFloat, Codec::None};
    case Codec::BFloat16: // these two as casts of the whole bucket: see Wire
      return {at::kBFloat16, Codec::None};
    case Codec::Float16:
      return {at::kHalf, Codec::None};
    case Codec::Int8:
      break;
  }
  return {at::kFloat, *named};
}

py::object lastStep(Reducer& reducer) {
  std::shared_ptr<const StepTrace> record;
  {
    const WithoutGil no_gil;
    record = reducer.lastStep();
  }
  if (record == nullptr) {
    return py::none();
  }
  py::list buckets;
  for (const StepTrace::Bucket& of : record->buckets) {
    py::dict bucket;
    bucket["gradient_nbytes"] = of.gradient_nbytes;
    bucket["wire_nbytes"] = of.wire_nbytes;
    bucket["first_gradient_ns"] = of.first_gradient_ns;
    bucket["launched_ns"] = of.launched_ns;
    bucket["reduced_ns"] = of.reduced_ns.load(std::memory_order_acquire);
    bucket["unpacked_ns"] = of.unpacked_ns;
    buckets.append(bucket);
  }
  py::dict step;
  step["began_ns"] = record->began_ns;
  step["first_gradient_ns"] = record->first_gradient_ns;
  step["backward_ended_ns"] = record->backward_ended_ns;
  step["ended_ns"] = record->ended_ns;
  step["buckets"] = buckets;
  return step;
}

/// A list of (step, [(weight, last_compute_ns, batches, largest) of each rank], members).
py::list stepRows(Reducer& reducer, int64_t since) {
  const std::vector<PassWeights::Step> steps = [&] {
    const WithoutGil no_gil;
    return raising([&] { return reducer.stepRows(since); });
  }();
  py::list found;
  for (const PassWeights::Step& step : steps) {
    py::list rows;
    for (const PassWeights::Row& row : step.rows) {
      rows.append(py::make_tuple(row.weight, row.last_compute_ns, row.batches, row.largest));
    }
    found.append(py::make_tuple(step.index, rows, step.members));
  }
  return found;
}

using Held = std::map<std::string, bool>; // by name: whether .grad is zeros of a pass without weight

std::tuple<double, double, int64_t, bool, Held, int64_t, int64_t, int64_t, bool, bool> weighed(Reducer& reducer) {
  const PassWeights::Accumulated sum = reducer.weighed().saved.sum;
  Held held;
  for (size_t index = 0; index < sum.holds.size(); ++index) {
    if (sum.holds[index] != PassWeights::Holds::Other) {
      held[reducer.params()[index].name] = sum.holds[index] == PassWeights::Holds::Zeros;
    }
  }
  return {
      sum.weight,
      sum.unit,
      sum.passes,
      sum.alike,
      held,
      sum.batches,
      sum.compute_ns,
      sum.gap_ns,
      sum.cannot_follow,
      sum.stray};
}

double weightUnsynced(Reducer& reducer) {
  return reducer.weighed().saved.unsynced;
}

int64_t lastComputeNs(Reducer& reducer) {
  return reducer.weighed().saved.last_compute_ns;
}

std::optional<double> pendingWeight(Reducer& reducer) {
  return reducer.weighed().pending;
}

int64_t weighedSteps(Reducer& reducer) {
  return reducer.weighed().steps;
}

using Weighed = std::tuple<
    double,
    double,
    int64_t,
    bool,
    Held,
    int64_t,
    int64_t,
    int64_t,
    bool,
    bool,
    int64_t>; // as communication_state_dict() has it

PassWeights::Accumulated accumulatedOf(const Reducer& reducer, const Weighed& weighed) {
  Held held = std::get<Held>(weighed);
  PassWeights::Accumulated sum{
      std::get<0>(weighed),
      std::get<1>(weighed),
      std::get<2>(weighed),
      std::get<3>(weighed),
      {},
      std::get<5>(weighed),
      std::get<6>(weighed),
      std::get<7>(weighed),
      std::get<8>(weighed),
      std::get<9>(weighed)};
  for (const ReducedParam& param : reducer.params()) {
    const auto found = held.extract(param.name);
    const auto holds = found.empty() ? PassWeights::Holds::Other
        : found.mapped()             ? PassWeights::Holds::Zeros
                                     : PassWeights::Holds::Sum;
    sum.holds.push_back(holds);
  }
  TORCH_CHECK_VALUE(
      held.empty(), "no parameter '", held.begin()->first, "' is reduced here, and the state's passes have had one");
  return sum;
}

void load(
    Reducer& reducer,
    std::map<std::string, int> exponents,
    std::vector<std::string> order,
    bool agreed,
    int64_t accumulated,
    std::vector<std::string> used,
    std::map<std::string, at::Tensor> residuals,
    std::optional<Weighed> weighed,
    double weight_unsynced) {
  Reducer::Saved saved;
  saved.exponents = std::move(exponents);
  saved.order = std::move(order);
  saved.agreed = agreed;
  saved.accumulated = accumulated;
  saved.used = std::move(used);
  saved.residuals = std::move(residuals);
  if (weighed.has_value()) {
    saved.weights = {accumulatedOf(reducer, *weighed), std::get<10>(*weighed), weight_unsynced};
  }
  reducer.load(std::move(saved));
}

std::shared_ptr<Reducer> makeReducer(
    const std::vector<at::Tensor>& params,
    const std::vector<std::string>& names,
    const std::vector<std::optional<std::string>>& wires,
    const std::vector<bool>& sparse,
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    const std::optional<c10::intrusive_ptr<c10d::Backend>>& backend,
    const std::optional<c10::intrusive_ptr<c10d::Store>>& store,
    std::vector<size_t> bucket_caps,
    size_t last_bucket_cap,
    int64_t accumulate,
    bool find_unused_parameters,
    bool gradient_as_bucket_view,
    bool error_feedback,
    bool drops_nonfinite_steps,
    bool weighs,
    bool may_be_weightless,
    bool has_sync_batch_norm,
    int64_t wrapper_number,
    std::string cuda_library,
    const std::optional<std::shared_ptr<StepAgreement>>& agreement) {
  TORCH_CHECK_VALUE(
      names.size() == params.size() && wires.size() == params.size() && sparse.size() == params.size(),
      "one name, wire dtype and answer to sparse a parameter");
  std::vector<ReducedParam> reduced;
  for (size_t index = 0; index < params.size(); ++index) {
    const auto [dtype, codec] = wireOf(wires[index]);
    reduced.push_back({params[index], names[index], dtype, codec, sparse[index]});
  }
  ReducerOptions options;
  options.caps = {std::move(bucket_caps), last_bucket_cap};
  options.accumulate = accumulate;
  options.find_unused_parameters = find_unused_parameters;
  options.gradient_as_bucket_view = gradient_as_bucket_view;
  options.error_feedback = error_feedback;
  options.drops_nonfinite_steps = drops_nonfinite_steps;
  options.weighs = weighs;
  options.may_be_weightless = may_be_weightless;
  options.has_sync_batch_norm = has_sync_batch_norm;
  options.wrapper_number = wrapper_number;
  options.cuda_library = std::move(cuda_library);
  options.elastic = agreement.has_value();
  const WithoutGil no_gil; // memory that ranks share takes a while
  return raising([&] {
    return std::make_shared<Reducer>(
        std::move(reduced),
        std::move(group),
        std::move(options),
        backend.value_or(nullptr),
        store.value_or(nullptr),
        agreement.value_or(nullptr));
  });
}

using PythonFuture = std::shared_ptr<torch::jit::PythonFutureWrapper>;

void installFutures(Reducer& reducer, const std::vector<PythonFuture>& futures) {
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> inner;
  for (const PythonFuture& future : futures) {
    inner.push_back(future->fut);
  }
  const WithoutGil no_gil;
  raising([&] { reducer.installPostBackwardFutures(std::move(inner)); });
}

void passWithoutBatch(const std::vector<std::pair<std::shared_ptr<Reducer>, bool>>& passes) {
  const WithoutGil no_gil;
  raising([&] { Reducer::passWithoutBatch(passes); });
}

/// `group`: of the hook's collectives, as far as it is known; None: the reducer's.
void registerPythonHook(
    Reducer& reducer,
    py::object state,
    py::object hook,
    std::string name,
    std::optional<c10::intrusive_ptr<c10d::ProcessGroup>> group) {
  CommHook made{
      std::make_shared<c10d::PythonCommHook>(std::move(state), std::move(hook)),
      std::move(name),
      group.value_or(nullptr)};
  const WithoutGil no_gil;
  raising([&] { reducer.registerCommHook(std::move(made)); });
}

// Methods that torch's wrapper calls only under options that ours refuses. They exist so that a new way to get here is
// a sentence and not an AttributeError.
template <typename Class>
void defUnsupported(Class& bound, const char* method, const char* what) {
  bound.def(method, [method, what](const py::object& /*self*/, const py::args& /*args*/, const py::kwargs& /*kwargs*/) {
    PyErr_SetString(
        PyExc_NotImplementedError,
        (std::string(what) + " is not supported by pycomm.DistributedDataParallel (" + method + ")").c_str());
    throw py::error_already_set();
  });
}

void bindReducer(py::module_& m) {
  py::class_<ReducerStats>(m, "ReducerStats")
      .def_readonly("passes", &ReducerStats::passes)
      .def_readonly("steps", &ReducerStats::steps)
      .def_readonly("buckets_reduced", &ReducerStats::buckets_reduced)
      .def_readonly("wire_nbytes", &ReducerStats::wire_nbytes)
      .def_readonly("gradient_nbytes", &ReducerStats::gradient_nbytes)
      .def_readonly("exposed_ns", &ReducerStats::exposed_ns)
      .def_readonly("overflowed_buckets", &ReducerStats::overflowed_buckets)
      .def_readonly("underflowed_buckets", &ReducerStats::underflowed_buckets)
      .def_readonly("nonfinite_buckets", &ReducerStats::nonfinite_buckets)
      .def_readonly("forgotten_residuals", &ReducerStats::forgotten_residuals)
      .def_readonly("accumulated", &ReducerStats::accumulated)
      .def_readonly("redone_steps", &ReducerStats::redone_steps)
      .def_readonly("lost_ranks", &ReducerStats::lost_ranks)
      .def_readonly("left_ranks", &ReducerStats::left_ranks)
      .def_readonly("joined_ranks", &ReducerStats::joined_ranks)
      .def_readonly("epochs", &ReducerStats::epochs)
      .def_readonly("agreeing_ns", &ReducerStats::agreeing_ns)
      .def_readonly("meeting_ns", &ReducerStats::meeting_ns)
      .def_readonly("redoing_ns", &ReducerStats::redoing_ns)
      .def_readonly("shared_nbytes", &ReducerStats::shared_nbytes)
      .def_property_readonly(
          "past", [](const ReducerStats& stats) { // (ranks, wire_nbytes, gradient_nbytes, codec_overflows)
            std::vector<std::tuple<int, int64_t, int64_t, int64_t>> past;
            for (const ReducerStats::Epoch& each : stats.past) {
              past.emplace_back(each.size, each.wire_nbytes, each.gradient_nbytes, each.codec_overflows);
            }
            return past;
          });

  ReducerClass reducer(m, "Reducer");
  reducer
      .def(
          py::init(torch::wrap_pybind_function(makeReducer)),
          py::arg("params"),
          py::arg("names"),
          py::arg("wires"),
          py::arg("sparse"),
          py::arg("process_group"),
          py::arg("backend"),
          py::arg("store"),
          py::kw_only(),
          py::arg("bucket_caps"),
          py::arg("last_bucket_cap"),
          py::arg("accumulate"),
          py::arg("find_unused_parameters"),
          py::arg("gradient_as_bucket_view"),
          py::arg("error_feedback"),
          py::arg("drops_nonfinite_steps"),
          py::arg("weighs"),
          py::arg("may_be_weightless"),
          py::arg("has_sync_batch_norm"),
          py::arg("wrapper_number"),
          py::arg("cuda_library"),
          py::arg("agreement"))
      .def("prepare_for_forward", blocking(&Reducer::prepareForForward))
      .def("mark_forward", blocking(&Reducer::markForward), py::arg("outputs"), py::arg("reduces"), py::arg("weight"))
      .def("forward_began", blocking(&Reducer::forwardBegan), py::arg("weight"))
      .def("forward_failed", blocking(&Reducer::forwardFailed))
      .def("is_within_backward", blocking(&Reducer::isWithinBackward))
      .def("set_weight", blocking(&Reducer::setWeight), py::arg("weight"))
      .def("used_here", blocking(&Reducer::usedHere))
      .def("weight_unsynced", blocking(weightUnsynced))
      .def("set_weight_unsynced", blocking(&Reducer::setWeightUnsynced), py::arg("weight"))
      .def("set_largest", blocking(&Reducer::setLargest), py::arg("largest"))
      .def("pending_weight", blocking(pendingWeight))
      .def_static("ran_forward", &Reducer::ranForward)
      .def_static("pass_without_batch", torch::wrap_pybind_function(passWithoutBatch), py::arg("passes"))
      .def("step_rows", stepRows, py::arg("since"))
      .def("weighed", blocking(weighed))
      .def("weighed_steps", blocking(weighedSteps))
      .def("last_compute_ns", blocking(lastComputeNs))
      .def("prepare_for_backward", blocking(&Reducer::prepareForBackward), py::arg("outputs"))
      .def("_rebuild_buckets", blocking(&Reducer::rebuildBuckets))
      .def("_push_all_rebuilt_params", [](const Reducer& /*self*/) {}) // shadow_backward() leaves all that is needed
      .def("_set_static_graph", blocking(&Reducer::setStaticGraph))
      .def("_delay_all_reduce", blocking(&Reducer::delayAllReduce))
      .def("is_counting", blocking(&Reducer::isCounting))
      .def(
          "_set_forward_pass_work_handle",
          blocking(&Reducer::setForwardPassWork),
          py::arg("work"),
          py::arg("use_static_world_size"))
      .def("shadow_backward", blocking(&Reducer::shadowBackward), py::arg("divide_by_initial_world_size"))
      .def("_install_post_backward_futures", torch::wrap_pybind_function(installFutures), py::arg("futures"))
      .def("passes", blocking(&Reducer::passes))
      .def("follow_members", blocking(&Reducer::followMembers), py::arg("passes"))
      .def("record_steps", blocking(&Reducer::recordSteps), py::arg("on"))
      .def("last_step", lastStep)
      .def("exponents", blocking(&Reducer::exponents))
      .def("order", blocking(&Reducer::order))
      .def(
          "load",
          blocking(load),
          py::arg("exponents"),
          py::arg("order"),
          py::arg("agreed"),
          py::arg("accumulated"),
          py::arg("used"),
          py::arg("residuals"),
          py::arg("weighed"),
          py::arg("weight_unsynced"))
      .def("residuals", blocking(&Reducer::residuals))
      .def("scale_residuals", blocking(&Reducer::scaleResiduals), py::arg("factor"))
      .def("bucket_names", blocking(&Reducer::bucketNames))
      .def("check_hook_may_be_set", blocking(&Reducer::checkHookMayBeSet))
      .def(
          "_register_comm_hook",
          torch::wrap_pybind_function(registerPythonHook),
          py::arg("state"),
          py::arg("hook"),
          py::arg("name") = "",
          py::arg("process_group") = py::none())
      .def("_register_builtin_comm_hook", blocking(&Reducer::registerBuiltinHook), py::arg("type"))
      .def("_remove_autograd_hooks", blocking(&Reducer::removeAutogradHooks))
      .def("_check_reducer_finalized", blocking(&Reducer::checkFinalized))
      .def("_reset_state", blocking(&Reducer::resetState))
      .def("_update_process_group", blocking(&Reducer::updateProcessGroup), py::arg("new_process_group"))
      .def("share_store", blocking(&Reducer::shareStore), py::arg("store"))
      .def("set_buffers", blocking(&Reducer::setBuffers), py::arg("buffers"))
      .def("members", blocking(&Reducer::members))
      .def("leads", blocking(&Reducer::leads))
      .def("await_newcomers", blocking(&Reducer::awaitNewcomers))
      .def("join_point", blocking(&Reducer::joinPoint))
      .def("sum_of_members", blocking(&Reducer::sumOfMembers), py::arg("values"), py::arg("about"))
      .def("ask_to_leave", blocking(&Reducer::askToLeave))
      .def("has_left", blocking(&Reducer::hasLeft))
      .def("explain_forward", blocking(&Reducer::explainForward), py::arg("error"))
      .def("stats", blocking(&Reducer::stats))
      .def("set_logger", [](const Reducer& /*self*/, const py::object& /*logger*/) {}) // ours reads, nothing is pushed
      .def("_set_ddp_runtime_logging_sample_rate", [](const Reducer& /*self*/, int /*rate*/) {}); // counts every step

  defUnsupported(reducer, "_autograd_hook", "mixed_precision");
  defUnsupported(reducer, "_set_mixed_precision_param_dtype", "mixed_precision");
  defUnsupported(reducer, "_set_optimizer_in_backward", "an optimizer applied in backward");
  defUnsupported(reducer, "_run_allreduce_hook", "an optimizer applied in backward");
  defUnsupported(reducer, "_get_zeros_like_grad_buckets", "torch's way of following a reduction");
  defUnsupported(reducer, "_run_comm_hook", "torch's way of following a reduction");
  defUnsupported(reducer, "_get_local_used_map", "torch's way of following a reduction");
  defUnsupported(reducer, "_set_sparse_metadata", "metadata of sparse gradients");
}

void bindLogger(py::module_& m) {
  py::class_<DdpLogger, std::shared_ptr<DdpLogger>> logger(m, "DdpLogger");
  logger.def(py::init<std::shared_ptr<Reducer>>(), py::arg("reducer"))
      .def("set_construction_data_and_log", blocking(&DdpLogger::setConstructionData))
      .def("set_error_and_log", blocking(&DdpLogger::setError))
      .def("set_runtime_stats_and_log", [](const DdpLogger& /*self*/) {}) // the reducer counts
      .def("_set_static_graph", blocking(&DdpLogger::setStaticGraph))
      .def("_set_uneven_input_join", blocking(&DdpLogger::setUnevenInputJoin))
      .def("_set_comm_hook_name", blocking(&DdpLogger::setCommHookName))
      .def("_get_ddp_logging_data", blocking(&DdpLogger::table));
}

} // namespace

void bindDdp(py::module_& m) {
  bindReducer(m);
  bindLogger(m);
}

} // namespace pycomm
