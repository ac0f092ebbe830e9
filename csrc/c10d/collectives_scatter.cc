// scatter, reduce_scatter and all_to_all in all their forms: every rank gets a part.
#include <string>
#include <utility>

#include "c10d/backend.h"
#include "c10d/part_counts.h"
#include "c10d/raising.h"
#include "c10d/tensor_checks.h"

namespace pycomm {
namespace {

/// The checks of a list with one input per rank. This rank's input ends in `output`.
void checkScattered(
    const std::vector<at::Tensor>& inputs,
    const at::Tensor& output,
    int rank,
    int size,
    const char* op) {
  checkCount(inputs.size(), size, op, "input tensors");
  checkTensors(inputs, op, "input");
  checkSameDtype(inputs.front(), output, op);
  const at::Tensor& own = inputs[static_cast<size_t>(rank)];
  if (own.numel() != output.numel()) {
    throw Error(
        ErrorCode::InvalidArgument,
        std::string(op) + ": this rank's input has " + std::to_string(own.numel()) + " elements, its output " +
            std::to_string(output.numel()) + ".",
        "input tensor r needs the shape that rank r passes as output");
  }
  checkApart(inputs, output, rank, op);
}

/// Elements for each rank. Splits count rows of the first dimension; none given means even ones.
std::vector<int64_t> splitCounts(
    const at::Tensor& tensor,
    const std::vector<int64_t>& splits,
    int size,
    const char* op,
    const char* what) {
  std::vector<int64_t> counts;
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  if (splits.empty()) {
    if (rows % size != 0) {
      throw Error(
          ErrorCode::InvalidArgument,
          std::string(op) + ": the " + what + "'s first dimension (" + std::to_string(rows) +
              ") does not divide by the group's size.",
          "pass split sizes");
    }
    counts.assign(static_cast<size_t>(size), rows / size * row);
    return counts;
  }
  checkCount(splits.size(), size, op, "split sizes");
  int64_t total = 0;
  for (const int64_t split : splits) {
    if (split < 0) {
      throw Error(
          ErrorCode::InvalidArgument,
          std::string(op) + ": the " + what + " has a split size of " + std::to_string(split) + ".",
          "split sizes count rows of the first dimension");
    }
    counts.push_back(split * row);
    total += split;
  }
  if (total != rows) {
    throw Error(
        ErrorCode::InvalidArgument,
        std::string(op) + ": the " + what + "'s split sizes add up to " + std::to_string(total) +
            ", its first dimension is " + std::to_string(rows) + ".");
  }
  return counts;
}

} // namespace

c10::intrusive_ptr<c10d::Work> PycommBackend::scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ScatterOptions& opts) {
  return raising([&] {
    const at::Tensor& output = onlyTensor(outputs, "scatter");
    checkOutput(output, "scatter");
    const bool root = getRank() == opts.rootRank;
    checkCount(inputs.size(), root ? 1 : 0, "scatter", "input lists");
    Prepared prepared = prepare();
    prepared.content.outputs = outputs;
    Group::Call request = call(Collective::Scatter, opts, output);
    if (root) {
      checkScattered(inputs.front(), output, getRank(), getSize(), "scatter");
      prepared.content.inputs = inputs.front();
      request.schedule.counts = countsOf(inputs.front());
      readParts(request, prepared.staging, inputs.front());
    } else {
      request.schedule.counts = onlyOwnCount(output, getRank(), getSize());
    }
    request.output = prepared.staging.out(output);
    prepared.calls.push_back(std::move(request));
    return begin({c10d::OpType::SCATTER, "pycomm:scatter"}, std::move(prepared));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::reduce_scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& opts) {
  return raising([&] {
    const at::Tensor& output = onlyTensor(outputs, "reduce_scatter");
    checkCount(inputs.size(), 1, "reduce_scatter", "input lists");
    checkOutput(output, "reduce_scatter");
    checkScattered(inputs.front(), output, getRank(), getSize(), "reduce_scatter");
    Prepared prepared = prepare();
    prepared.content.inputs = inputs.front();
    prepared.content.outputs = outputs;
    Group::Call request = call(Collective::ReduceScatter, opts, output);
    setParts(request.schedule, inputs.front());
    chooseCodec(request);
    readParts(request, prepared.staging, inputs.front());
    request.output = prepared.staging.out(output);
    prepared.calls.push_back(std::move(request));
    return begin({c10d::OpType::REDUCE_SCATTER, "pycomm:reduce_scatter"}, std::move(prepared));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::ReduceScatterOptions& opts) {
  std::vector<at::Tensor> outputs{output};
  std::vector<at::Tensor> inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<c10d::Work> PycommBackend::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& opts) {
  constexpr const char* kOp = "reduce_scatter_tensor";
  return raising([&] {
    checkCount(outputs.size(), static_cast<int>(inputs.size()), kOp, "outputs");
    Prepared prepared = prepare();
    prepared.content.inputs = inputs;
    prepared.content.outputs = outputs;
    for (size_t i = 0; i < inputs.size(); ++i) {
      checkTensor(inputs[i], kOp, "input");
      checkOutput(outputs[i], kOp);
      checkSameDtype(inputs[i], outputs[i], kOp);
      checkTimes(inputs[i], outputs[i], getSize(), kOp, "input");
      checkPart(inputs[i], outputs[i], getRank(), kOp);
      Group::Call request = call(Collective::ReduceScatter, opts, inputs[i]);
      request.schedule.numel = outputs[i].numel();
      chooseCodec(request);
      request.input = prepared.staging.in(inputs[i]);
      request.output = prepared.staging.out(outputs[i]);
      prepared.calls.push_back(std::move(request));
    }
    return begin({c10d::OpType::_REDUCE_SCATTER_BASE, "pycomm:reduce_scatter_tensor"}, std::move(prepared));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& opts) {
  constexpr const char* kOp = "all_to_all_single";
  return raising([&] {
    checkTensor(input, kOp, "input");
    checkOutput(output, kOp);
    checkSameDtype(input, output, kOp);
    checkDisjoint({input}, {output}, kOp);
    Prepared prepared = prepare();
    prepared.content.inputs = {input};
    prepared.content.outputs = {output};
    Group::Call request = call(Collective::AllToAll, opts, input);
    request.schedule.counts = splitCounts(input, input_splits, getSize(), kOp, "input");
    request.schedule.recv_counts = splitCounts(output, output_splits, getSize(), kOp, "output");
    request.input = prepared.staging.in(input);
    request.output = prepared.staging.out(output);
    prepared.calls.push_back(std::move(request));
    return begin({c10d::OpType::ALLTOALL_BASE, "pycomm:all_to_all_single"}, std::move(prepared));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::alltoall(
    std::vector<at::Tensor>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllToAllOptions& opts) {
  return raising([&] {
    checkCount(inputs.size(), getSize(), "all_to_all", "input tensors");
    checkCount(outputs.size(), getSize(), "all_to_all", "output tensors");
    checkTensors(inputs, "all_to_all", "input");
    checkOutputs(outputs, "all_to_all");
    checkSameDtype(inputs.front(), outputs.front(), "all_to_all");
    checkDisjoint(inputs, outputs, "all_to_all");
    Prepared prepared = prepare();
    prepared.content.inputs = inputs;
    prepared.content.outputs = outputs;
    Group::Call request = call(Collective::AllToAll, opts, inputs.front());
    request.schedule.counts = countsOf(inputs);
    request.schedule.recv_counts = countsOf(outputs);
    readParts(request, prepared.staging, inputs);
    writeParts(request, prepared.staging, outputs);
    prepared.calls.push_back(std::move(request));
    return begin({c10d::OpType::ALLTOALL, "pycomm:all_to_all"}, std::move(prepared));
  });
}

} // namespace pycomm
