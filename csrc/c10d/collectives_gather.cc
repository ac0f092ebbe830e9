// all_gather and gather in all their forms: every rank gives a part.
#include <string>
#include <utility>

#include "c10d/backend.h"
#include "c10d/part_counts.h"
#include "c10d/raising.h"
#include "c10d/tensor_checks.h"

namespace pycomm {
namespace {

/// The checks of a list with one output per rank, of which `own` is to hold the input.
void checkGathered(
    const std::vector<at::Tensor>& outputs,
    const at::Tensor& input,
    int rank,
    int size,
    const char* op) {
  checkCount(outputs.size(), size, op, "output tensors");
  checkTensor(input, op, "input");
  checkOutputs(outputs, op);
  checkSameDtype(input, outputs.front(), op);
  const at::Tensor& own = outputs[static_cast<size_t>(rank)];
  if (own.numel() != input.numel()) {
    throw Error(
        ErrorCode::InvalidArgument,
        std::string(op) + ": this rank's output has " + std::to_string(own.numel()) + " elements, its input " +
            std::to_string(input.numel()) + ".",
        "output tensor r needs the shape that rank r passes as input");
  }
  checkApart(outputs, input, rank, op);
}

} // namespace

c10::intrusive_ptr<c10d::Work> PycommBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  return raising([&] {
    const at::Tensor& input = onlyTensor(inputs, "all_gather");
    checkCount(outputs.size(), 1, "all_gather", "output lists");
    checkGathered(outputs.front(), input, getRank(), getSize(), "all_gather");
    Prepared prepared = prepare();
    prepared.content.inputs = inputs;
    prepared.content.output_lists = outputs;
    Group::Call request = call(Collective::AllGather, opts, input);
    setParts(request.schedule, outputs.front());
    request.input = prepared.staging.in(input);
    writeParts(request, prepared.staging, outputs.front());
    prepared.calls.push_back(std::move(request));
    return begin({c10d::OpType::ALLGATHER, "pycomm:all_gather"}, std::move(prepared));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::allgather_coalesced(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  constexpr const char* kOp = "all_gather_coalesced";
  return raising([&] {
    // outputs[rank][i] is to hold that rank's inputs[i].
    checkCount(outputs.size(), getSize(), kOp, "output lists");
    for (const auto& list : outputs) {
      if (list.size() != inputs.size()) {
        throw Error(
            ErrorCode::InvalidArgument,
            std::string(kOp) + ": an output list has " + std::to_string(list.size()) + " tensors for " +
                std::to_string(inputs.size()) + " inputs.",
            "pass, for each rank, a list like the inputs");
      }
    }
    Prepared prepared = prepare();
    prepared.content.inputs = inputs;
    prepared.content.output_lists = outputs;
    for (size_t i = 0; i < inputs.size(); ++i) {
      std::vector<at::Tensor> column;
      for (const auto& list : outputs) {
        column.push_back(list[i]);
      }
      checkGathered(column, inputs[i], getRank(), getSize(), kOp);
      Group::Call request = call(Collective::AllGather, opts, inputs[i]);
      setParts(request.schedule, column);
      request.input = prepared.staging.in(inputs[i]);
      writeParts(request, prepared.staging, column);
      prepared.calls.push_back(std::move(request));
    }
    return begin({c10d::OpType::ALLGATHER_COALESCED, "pycomm:all_gather"}, std::move(prepared));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::_allgather_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::AllgatherOptions& opts) {
  std::vector<at::Tensor> outputs{output};
  std::vector<at::Tensor> inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<c10d::Work> PycommBackend::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  constexpr const char* kOp = "all_gather_into_tensor";
  return raising([&] {
    checkCount(outputs.size(), static_cast<int>(inputs.size()), kOp, "outputs");
    Prepared prepared = prepare();
    prepared.content.inputs = inputs;
    prepared.content.outputs = outputs;
    for (size_t i = 0; i < inputs.size(); ++i) {
      checkTensor(inputs[i], kOp, "input");
      checkOutput(outputs[i], kOp);
      checkSameDtype(inputs[i], outputs[i], kOp);
      // The parts' concatenation and their stack are the same run of elements, so any output shape of that size will do.
      checkTimes(outputs[i], inputs[i], getSize(), kOp, "output");
      checkPart(outputs[i], inputs[i], getRank(), kOp);
      Group::Call request = call(Collective::AllGather, opts, inputs[i]);
      request.schedule.numel = inputs[i].numel();
      request.input = prepared.staging.in(inputs[i]);
      request.output = prepared.staging.out(outputs[i]);
      prepared.calls.push_back(std::move(request));
    }
    return begin({c10d::OpType::_ALLGATHER_BASE, "pycomm:all_gather_into_tensor"}, std::move(prepared));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::gather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::GatherOptions& opts) {
  return raising([&] {
    const at::Tensor& input = onlyTensor(inputs, "gather");
    const bool root = getRank() == opts.rootRank;
    checkCount(outputs.size(), root ? 1 : 0, "gather", "output lists");
    if (root) {
      checkGathered(outputs.front(), input, getRank(), getSize(), "gather");
    } else {
      checkTensor(input, "gather", "input");
    }
    Prepared prepared = prepare();
    prepared.content.inputs = inputs;
    prepared.content.output_lists = outputs;
    Group::Call request = call(Collective::Gather, opts, input);
    request.input = prepared.staging.in(input);
    if (root) {
      request.schedule.counts = countsOf(outputs.front());
      writeParts(request, prepared.staging, outputs.front());
    } else {
      request.schedule.counts = onlyOwnCount(input, getRank(), getSize());
    }
    prepared.calls.push_back(std::move(request));
    return begin({c10d::OpType::GATHER, "pycomm:gather"}, std::move(prepared));
  });
}

} // namespace pycomm
