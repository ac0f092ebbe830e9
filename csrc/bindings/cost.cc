#include "bindings/cost.h"

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/algorithm_names.h"
#include "c10d/raising.h"
#include "schedule/cost_model.h"
#include "schedule/topology_view.h"

namespace py = pybind11;

namespace pycomm {
namespace {

py::dict scheduleCost(
    const std::string& collective,
    const std::string& algorithm,
    const std::vector<int32_t>& host_of_rank,
    int64_t nbytes,
    const std::vector<double>& network) {
  Cost cost;
  {
    const py::gil_scoped_release no_gil;
    raising([&] {
      if (network.size() != 6) {
        throw Error(
            ErrorCode::InvalidArgument, "network has " + std::to_string(network.size()) + " numbers, not 6.", "");
      }
      const TopologyView topology(host_of_rank);
      const auto kind = collectiveNamed(collective);
      const auto how = algorithmNamed(algorithm);
      if (!kind || !how) {
        throw Error(
            ErrorCode::InvalidArgument, "there is no " + collective + " by " + algorithm + ".", "see docs/options.md");
      }
      ScheduleRequest request;
      request.kind = *kind;
      request.algorithm = *how;
      request.size = topology.size();
      request.topology = &topology;
      request.root = 0;
      request.dtype = DType::Float32;
      request.reduce_op = ReduceOp::Sum;
      const bool parts = *kind == Collective::AllGather || *kind == Collective::ReduceScatter;
      request.numel = nbytes / 4 / (parts ? request.size : 1);
      NetworkModel model;
      model.latency_s = network[0];
      model.card_bytes_per_s = network[1];
      model.local_latency_s = network[2];
      model.local_bytes_per_s = network[3];
      model.message_s = network[4];
      model.reduce_bytes_per_s = network[5];
      cost = costOf(request, model);
    });
  }
  py::dict result;
  result["seconds"] = cost.seconds;
  result["algorithm"] = std::string(algorithmName(cost.algorithm));
  result["sent_nbytes"] = cost.sent_nbytes;
  return result;
}

} // namespace

void bindCost(py::module_& m) {
  m.def(
      "schedule_cost",
      &scheduleCost,
      py::arg("collective"),
      py::arg("algorithm"),
      py::arg("host_of_rank"),
      py::arg("nbytes"),
      py::arg("network"));
}

} // namespace pycomm
