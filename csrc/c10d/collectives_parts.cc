// The collectives in which every rank gives or gets a part: all_gather, gather, scatter, reduce_scatter and all_to_all in all their forms.
#include <string>
#include <utility>

#include "c10d/backend.h"
#include "c10d/part_counts.h"
#include "c10d/raising.h"
#include "c10d/tensor_checks.h"

namespace pycomm {
namespace {

/// Which side of a call is a list with one tensor per rank. The other side is a single tensor, the part of this rank.
enum class Parts { Inputs, Outputs };

/// The checks of such a call. The part of this rank in the list and the single tensor are one another's copy, or in place.
void checkParts(
    Parts side,
    const std::vector<at::Tensor>& parts,
    const at::Tensor& single,
    int rank,
    int size,
    const char* op) {
  const bool outputs = side == Parts::Outputs;
  checkCount(parts.size(), size, op, outputs ? "output tensors" : "input tensors");
  if (outputs) {
    checkTensor(single, op, "input");
    checkOutputs(parts, op);
    checkSameDtype(single, parts.front(), op);
  } else {
    checkTensors(parts, op, "input");
    checkSameDtype(parts.front(), single, op);
  }
  const at::Tensor& own = parts[static_cast<size_t>(rank)];
  if (own.numel() != single.numel()) {
    const std::string listed = outputs ? "output" : "input";
    const std::string other = outputs ? "input" : "output";
    throw Error(
        ErrorCode::InvalidArgument,
        std::string(op) + ": this rank's " + listed + " has " + std::to_string(own.numel()) + " elements, its " +
            other + " " + std::to_string(single.numel()) + ".",
        listed + " tensor r needs the shape that rank r passes as " + other);
  }
  checkApart(parts, single, rank, op);
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

/// With a list on one side, which only the root passes if there is one.
template <typename Opts>
c10::intrusive_ptr<c10d::Work> PycommBackend::withList(
    Collective kind,
    std::vector<std::vector<at::Tensor>>& lists,
    std::vector<at::Tensor>& singles,
    const Opts& opts,
    Titled titled) {
  const char* const op = collectiveName(kind);
  return raising([&] {
    const Parts side = kind == Collective::AllGather || kind == Collective::Gather ? Parts::Outputs : Parts::Inputs;
    const at::Tensor& single = onlyTensor(singles, op);
    bool passes_list = true;
    if constexpr (HasRoot<Opts>::value) {
      passes_list = getRank() == opts.rootRank;
    }
    checkCount(lists.size(), passes_list ? 1 : 0, op, side == Parts::Outputs ? "output lists" : "input lists");
    if (side == Parts::Inputs) {
      checkOutput(single, op);
    } else if (!passes_list) {
      checkTensor(single, op, "input");
    }
    const std::vector<at::Tensor> none;
    const std::vector<at::Tensor>& parts = passes_list ? lists.front() : none;
    if (passes_list) {
      checkParts(side, parts, single, getRank(), getSize(), op);
    }
    Prepared prepared = prepare();
    Group::Call request = call(kind, opts, single);
    if constexpr (HasRoot<Opts>::value) {
      request.schedule.counts = passes_list ? countsOf(parts) : onlyOwnCount(single, getRank(), getSize());
    } else {
      setParts(request.schedule, parts);
    }
    if (kind == Collective::ReduceScatter) {
      chooseCodec(request);
    }
    if (side == Parts::Outputs) {
      prepared.content.inputs = singles;
      prepared.content.output_lists = lists;
      request.input = prepared.staging.in(single);
      if (passes_list) {
        writeParts(request, prepared.staging, parts);
      }
    } else {
      prepared.content.inputs = parts;
      prepared.content.outputs = singles;
      if (passes_list) {
        readParts(request, prepared.staging, parts);
      }
      request.output = prepared.staging.out(single);
    }
    prepared.calls.push_back(std::move(request));
    return begin(titled, std::move(prepared));
  });
}

/// With even parts, one behind the other in one tensor. The parts' concatenation and their stack are the same run of elements, so any shape
/// of that size will do.
template <typename Opts>
c10::intrusive_ptr<c10d::Work> PycommBackend::withWhole(
    Collective kind,
    std::vector<at::Tensor>& outputs,
    std::vector<at::Tensor>& inputs,
    const Opts& opts) {
  return raising([&] {
    const bool gathers = kind == Collective::AllGather;
    const char* const op = gathers ? "all_gather_into_tensor" : "reduce_scatter_tensor";
    checkCount(outputs.size(), static_cast<int>(inputs.size()), op, "outputs");
    Prepared prepared = prepare();
    prepared.content.inputs = inputs;
    prepared.content.outputs = outputs;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor& whole = gathers ? outputs[i] : inputs[i];
      const at::Tensor& part = gathers ? inputs[i] : outputs[i];
      checkTensor(inputs[i], op, "input");
      checkOutput(outputs[i], op);
      checkSameDtype(inputs[i], outputs[i], op);
      checkTimes(whole, part, getSize(), op, gathers ? "output" : "input");
      checkPart(whole, part, getRank(), op);
      Group::Call request = call(kind, opts, inputs[i]);
      request.schedule.numel = part.numel();
      if (!gathers) {
        chooseCodec(request);
      }
      request.input = prepared.staging.in(inputs[i]);
      request.output = prepared.staging.out(outputs[i]);
      prepared.calls.push_back(std::move(request));
    }
    const Titled titled = gathers ? Titled{c10d::OpType::_ALLGATHER_BASE, "pycomm:all_gather_into_tensor"}
                                  : Titled{c10d::OpType::_REDUCE_SCATTER_BASE, "pycomm:reduce_scatter_tensor"};
    return begin(titled, std::move(prepared));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  return withList(Collective::AllGather, outputs, inputs, opts, {c10d::OpType::ALLGATHER, "pycomm:all_gather"});
}

c10::intrusive_ptr<c10d::Work> PycommBackend::gather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::GatherOptions& opts) {
  return withList(Collective::Gather, outputs, inputs, opts, {c10d::OpType::GATHER, "pycomm:gather"});
}

c10::intrusive_ptr<c10d::Work> PycommBackend::scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ScatterOptions& opts) {
  return withList(Collective::Scatter, inputs, outputs, opts, {c10d::OpType::SCATTER, "pycomm:scatter"});
}

c10::intrusive_ptr<c10d::Work> PycommBackend::reduce_scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& opts) {
  return withList(
      Collective::ReduceScatter, inputs, outputs, opts, {c10d::OpType::REDUCE_SCATTER, "pycomm:reduce_scatter"});
}

c10::intrusive_ptr<c10d::Work> PycommBackend::_allgather_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::AllgatherOptions& opts) {
  std::vector<at::Tensor> outputs{output};
  std::vector<at::Tensor> inputs{input};
  return withWhole(Collective::AllGather, outputs, inputs, opts);
}

c10::intrusive_ptr<c10d::Work> PycommBackend::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  return leaving([&] { return withWhole(Collective::AllGather, outputs, inputs, opts); });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::ReduceScatterOptions& opts) {
  std::vector<at::Tensor> outputs{output};
  std::vector<at::Tensor> inputs{input};
  return withWhole(Collective::ReduceScatter, outputs, inputs, opts);
}

c10::intrusive_ptr<c10d::Work> PycommBackend::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& opts) {
  return leaving([&] { return withWhole(Collective::ReduceScatter, outputs, inputs, opts); });
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
      checkParts(Parts::Outputs, column, inputs[i], getRank(), getSize(), kOp);
      Group::Call request = call(Collective::AllGather, opts, inputs[i]);
      setParts(request.schedule, column);
      request.input = prepared.staging.in(inputs[i]);
      writeParts(request, prepared.staging, column);
      prepared.calls.push_back(std::move(request));
    }
    return begin({c10d::OpType::ALLGATHER_COALESCED, "pycomm:all_gather"}, std::move(prepared));
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
