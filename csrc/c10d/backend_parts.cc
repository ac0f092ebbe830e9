// The collectives in which every rank has a part of its own.
#include <ATen/ops/empty.h>

#include <numeric>
#include <utility>

#include "c10d/backend.h"
#include "c10d/dtypes.h"
#include "c10d/raising.h"
#include "c10d/tensor_checks.h"

namespace pycomm {
namespace {

/// One flat tensor for a list with a tensor a rank, and where each rank's part lies in it.
struct Flat {
  at::Tensor tensor;
  std::vector<int64_t> counts; ///< elements of each part
  bool even = true;

  explicit Flat(const std::vector<at::Tensor>& parts) {
    for (const at::Tensor& part : parts) {
      counts.push_back(part.numel());
      even = even && part.numel() == parts.front().numel();
    }
    tensor = at::empty({std::accumulate(counts.begin(), counts.end(), int64_t{0})}, parts.front().options());
  }

  [[nodiscard]] at::Tensor part(size_t rank) const {
    const int64_t begin =
        std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(rank), int64_t{0});
    return tensor.narrow(0, begin, counts[rank]);
  }
  void gatherFrom(const std::vector<at::Tensor>& parts) const {
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      part(rank).copy_(parts[rank].reshape(-1));
    }
  }
  void scatterTo(std::vector<at::Tensor>& parts) const {
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      parts[rank].copy_(part(rank).view(parts[rank].sizes()));
    }
  }
};

void setParts(ScheduleRequest& schedule, const Flat& flat) {
  schedule.numel = flat.even ? flat.counts.front() : 0;
  if (!flat.even) {
    schedule.counts = flat.counts;
  }
}

void setDtype(ScheduleRequest& schedule, const at::Tensor& tensor) {
  schedule.dtype = toDType(tensor.scalar_type());
  schedule.wire_dtype = schedule.dtype;
}

void checkSameDtype(const at::Tensor& a, const at::Tensor& b, const char* op) {
  if (a.scalar_type() != b.scalar_type()) {
    throw Error(
        ErrorCode::InvalidArgument,
        std::string(op) + ": input and output have different dtypes (" + c10::toString(a.scalar_type()) + " and " +
            c10::toString(b.scalar_type()) + ").");
  }
}

void checkTimes(const at::Tensor& large, const at::Tensor& small, int size, const char* op, const char* what) {
  if (large.numel() != small.numel() * size) {
    throw Error(
        ErrorCode::InvalidArgument,
        std::string(op) + ": the " + what + " needs " + std::to_string(small.numel() * size) + " elements for " +
            std::to_string(size) + " ranks and has " + std::to_string(large.numel()) + ".");
  }
}

} // namespace

c10::intrusive_ptr<c10d::Work> PycommBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  return raising([&] {
    const at::Tensor& input = onlyTensor(inputs, "all_gather");
    checkCount(outputs.size(), 1, "all_gather", "output lists");
    checkCount(outputs.front().size(), getSize(), "all_gather", "output tensors");
    checkTensor(input, "all_gather", "input");
    checkTensors(outputs.front(), "all_gather", "output");
    checkSameDtype(input, outputs.front().front(), "all_gather");
    const at::Tensor& own = outputs.front()[static_cast<size_t>(getRank())];
    if (own.numel() != input.numel()) {
      throw Error(
          ErrorCode::InvalidArgument,
          "all_gather: this rank's output has " + std::to_string(own.numel()) + " elements, its input " +
              std::to_string(input.numel()) + ".");
    }
    auto flat = std::make_shared<Flat>(outputs.front());
    Group::Call request = call(Collective::AllGather, opts);
    setDtype(request.schedule, input);
    setParts(request.schedule, *flat);
    request.input = viewOf(input);
    request.output = viewOf(flat->tensor);
    PycommWork::Content content;
    content.inputs = inputs;
    content.output_lists = outputs;
    content.unpack = [flat, lists = outputs]() mutable { flat->scatterTo(lists.front()); };
    content.operations.push_back(start(request));
    return work({c10d::OpType::ALLGATHER, "pycomm:all_gather"}, std::move(content));
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
    for (size_t i = 0; i < inputs.size(); ++i) {
      checkTensor(inputs[i], kOp, "input");
      checkTensor(outputs[i], kOp, "output");
      checkSameDtype(inputs[i], outputs[i], kOp);
      checkTimes(outputs[i], inputs[i], getSize(), kOp, "output");
    }
    PycommWork::Content content;
    content.inputs = inputs;
    content.outputs = outputs;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Group::Call request = call(Collective::AllGather, opts);
      setDtype(request.schedule, inputs[i]);
      request.schedule.numel = inputs[i].numel();
      request.input = viewOf(inputs[i]);
      request.output = viewOf(outputs[i]);
      content.operations.push_back(start(request));
    }
    return work({c10d::OpType::_ALLGATHER_BASE, "pycomm:all_gather_into_tensor"}, std::move(content));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::gather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::GatherOptions& opts) {
  return raising([&] {
    const at::Tensor& input = onlyTensor(inputs, "gather");
    checkTensor(input, "gather", "input");
    const bool root = getRank() == opts.rootRank;
    checkCount(outputs.size(), root ? 1 : 0, "gather", "output lists");
    Group::Call request = call(Collective::Gather, opts);
    setDtype(request.schedule, input);
    request.schedule.root = static_cast<int32_t>(opts.rootRank);
    request.schedule.numel = input.numel();
    request.input = viewOf(input);
    PycommWork::Content content;
    content.inputs = inputs;
    content.output_lists = outputs;
    if (root) {
      checkCount(outputs.front().size(), getSize(), "gather", "output tensors");
      checkTensors(outputs.front(), "gather", "output");
      checkSameDtype(input, outputs.front().front(), "gather");
      auto flat = std::make_shared<Flat>(outputs.front());
      if (!flat->even || flat->counts.front() != input.numel()) {
        throw Error(
            ErrorCode::InvalidArgument,
            "gather: every output tensor needs as many elements as the input (" + std::to_string(input.numel()) + ").");
      }
      request.output = viewOf(flat->tensor);
      content.unpack = [flat, lists = outputs]() mutable { flat->scatterTo(lists.front()); };
    }
    content.operations.push_back(start(request));
    return work({c10d::OpType::GATHER, "pycomm:gather"}, std::move(content));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ScatterOptions& opts) {
  return raising([&] {
    const at::Tensor& output = onlyTensor(outputs, "scatter");
    checkTensor(output, "scatter", "output");
    const bool root = getRank() == opts.rootRank;
    checkCount(inputs.size(), root ? 1 : 0, "scatter", "input lists");
    Group::Call request = call(Collective::Scatter, opts);
    setDtype(request.schedule, output);
    request.schedule.root = static_cast<int32_t>(opts.rootRank);
    request.schedule.numel = output.numel();
    request.output = viewOf(output);
    PycommWork::Content content;
    content.outputs = outputs;
    if (root) {
      checkCount(inputs.front().size(), getSize(), "scatter", "input tensors");
      checkTensors(inputs.front(), "scatter", "input");
      checkSameDtype(inputs.front().front(), output, "scatter");
      const Flat flat(inputs.front());
      if (!flat.even || flat.counts.front() != output.numel()) {
        throw Error(
            ErrorCode::InvalidArgument,
            "scatter: every input tensor needs as many elements as the output (" + std::to_string(output.numel()) +
                ").");
      }
      flat.gatherFrom(inputs.front());
      request.input = viewOf(flat.tensor);
      content.inputs = inputs.front();
      content.keep_alive.push_back(flat.tensor);
    }
    content.operations.push_back(start(request));
    return work({c10d::OpType::SCATTER, "pycomm:scatter"}, std::move(content));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::reduce_scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& opts) {
  return raising([&] {
    const at::Tensor& output = onlyTensor(outputs, "reduce_scatter");
    checkCount(inputs.size(), 1, "reduce_scatter", "input lists");
    checkCount(inputs.front().size(), getSize(), "reduce_scatter", "input tensors");
    checkTensor(output, "reduce_scatter", "output");
    checkTensors(inputs.front(), "reduce_scatter", "input");
    checkSameDtype(inputs.front().front(), output, "reduce_scatter");
    const Flat flat(inputs.front());
    const int64_t own = flat.counts[static_cast<size_t>(getRank())];
    if (own != output.numel()) {
      throw Error(
          ErrorCode::InvalidArgument,
          "reduce_scatter: this rank's input has " + std::to_string(own) + " elements, its output " +
              std::to_string(output.numel()) + ".");
    }
    flat.gatherFrom(inputs.front());
    Group::Call request = call(Collective::ReduceScatter, opts);
    setDtype(request.schedule, output);
    setParts(request.schedule, flat);
    request.schedule.reduce_op = toReduceOp(opts.reduceOp);
    request.premul_factor = premulFactor(opts.reduceOp);
    request.input = viewOf(flat.tensor);
    request.output = viewOf(output);
    PycommWork::Content content;
    content.inputs = inputs.front();
    content.outputs = outputs;
    content.keep_alive.push_back(flat.tensor);
    content.operations.push_back(start(request));
    return work({c10d::OpType::REDUCE_SCATTER, "pycomm:reduce_scatter"}, std::move(content));
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
    for (size_t i = 0; i < inputs.size(); ++i) {
      checkTensor(inputs[i], kOp, "input");
      checkTensor(outputs[i], kOp, "output");
      checkSameDtype(inputs[i], outputs[i], kOp);
      checkTimes(inputs[i], outputs[i], getSize(), kOp, "input");
    }
    PycommWork::Content content;
    content.inputs = inputs;
    content.outputs = outputs;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Group::Call request = call(Collective::ReduceScatter, opts);
      setDtype(request.schedule, inputs[i]);
      request.schedule.numel = outputs[i].numel();
      request.schedule.reduce_op = toReduceOp(opts.reduceOp);
      request.premul_factor = premulFactor(opts.reduceOp);
      request.input = viewOf(inputs[i]);
      request.output = viewOf(outputs[i]);
      content.operations.push_back(start(request));
    }
    return work({c10d::OpType::_REDUCE_SCATTER_BASE, "pycomm:reduce_scatter_tensor"}, std::move(content));
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
    checkTensor(output, kOp, "output");
    checkSameDtype(input, output, kOp);
    // Splits count rows of the first dimension.
    const auto elements = [&](const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* what) {
      std::vector<int64_t> counts;
      const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
      const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
      if (splits.empty()) {
        if (rows % getSize() != 0) {
          throw Error(
              ErrorCode::InvalidArgument,
              std::string(kOp) + ": the " + what + "'s first dimension (" + std::to_string(rows) +
                  ") does not divide by the group's size.",
              "pass split sizes");
        }
        counts.assign(static_cast<size_t>(getSize()), rows / getSize() * row);
        return counts;
      }
      checkCount(splits.size(), getSize(), kOp, "split sizes");
      int64_t total = 0;
      for (const int64_t split : splits) {
        counts.push_back(split * row);
        total += split;
      }
      if (total != rows) {
        throw Error(
            ErrorCode::InvalidArgument,
            std::string(kOp) + ": the " + what + "'s split sizes add up to " + std::to_string(total) +
                ", its first dimension is " + std::to_string(rows) + ".");
      }
      return counts;
    };
    Group::Call request = call(Collective::AllToAll, opts);
    setDtype(request.schedule, input);
    request.schedule.counts = elements(input, input_splits, "input");
    request.schedule.recv_counts = elements(output, output_splits, "output");
    request.input = viewOf(input);
    request.output = viewOf(output);
    PycommWork::Content content;
    content.inputs = {input};
    content.outputs = {output};
    content.operations.push_back(start(request));
    return work({c10d::OpType::ALLTOALL_BASE, "pycomm:all_to_all_single"}, std::move(content));
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
    checkTensors(outputs, "all_to_all", "output");
    checkSameDtype(inputs.front(), outputs.front(), "all_to_all");
    const Flat from(inputs);
    from.gatherFrom(inputs);
    auto to = std::make_shared<Flat>(outputs);
    Group::Call request = call(Collective::AllToAll, opts);
    setDtype(request.schedule, inputs.front());
    request.schedule.counts = from.counts;
    request.schedule.recv_counts = to->counts;
    request.input = viewOf(from.tensor);
    request.output = viewOf(to->tensor);
    PycommWork::Content content;
    content.inputs = inputs;
    content.outputs = outputs;
    content.keep_alive = {from.tensor};
    content.unpack = [to, lists = outputs]() mutable { to->scatterTo(lists); };
    content.operations.push_back(start(request));
    return work({c10d::OpType::ALLTOALL, "pycomm:all_to_all"}, std::move(content));
  });
}

} // namespace pycomm
