// The collectives that work on one whole tensor of each rank.
#include <ATen/core/grad_mode.h>

#include <utility>

#include "c10d/backend.h"
#include "c10d/exact_sums.h"
#include "c10d/raising.h"
#include "c10d/tensor_checks.h"
#include "engine/operation/issue_context.h"
#include "schedule/select.h"

namespace pycomm {
namespace {

void checkResidual(const at::Tensor& tensor, const at::Tensor& residual, ReduceOp op) {
  const bool fits = residual.scalar_type() == at::kFloat && tensor.scalar_type() == at::kFloat &&
      residual.is_contiguous() && residual.numel() == tensor.numel() && residual.device().is_cpu() &&
      op == ReduceOp::Sum && !residual.is_alias_of(tensor);
  if (!fits) {
    throw Error(
        ErrorCode::InvalidArgument,
        "What all_reduce loses cannot be kept: that needs a sum of float32 tensors.",
        "pass a contiguous float32 tensor of the same size, that shares no memory with the other, and ReduceOp.SUM");
  }
}

void addResidual(const at::Tensor& tensor, const at::Tensor& residual) {
  const at::NoGradGuard no_grad;
  tensor.add_(residual.view(tensor.sizes()).to(tensor.device()));
  residual.zero_();
}

} // namespace

void PycommBackend::prepareAllReduce(Prepared& prepared, const at::Tensor& tensor, const c10d::AllreduceOptions& opts)
    const {
  Group::Call request = call(Collective::AllReduce, opts, tensor);
  request.schedule.algorithm = settings_.algorithm;
  request.schedule.numel = tensor.numel();
  request.output = prepared.staging.inOut(tensor);
  request.input = request.output;
  chooseCodec(request);
  prepared.calls.push_back(std::move(request));
}

void PycommBackend::chooseCodec(Group::Call& call) const {
  if (ExactSums::here()) {
    return;
  }
  call.schedule.codec = codecFor(call.schedule, IssueContext::currentTraits().codec.value_or(settings_.codec));
}

c10::intrusive_ptr<c10d::Work> PycommBackend::allreduce(
    std::vector<at::Tensor>& tensors,
    const c10d::AllreduceOptions& opts) {
  return raising([&] {
    at::Tensor& tensor = onlyTensor(tensors, "all_reduce");
    if (tensor.defined() && tensor.is_sparse()) {
      return sparseAllReduce(tensor, opts);
    }
    checkOutput(tensor, "all_reduce");
    Prepared prepared = prepare();
    prepared.content.inputs = tensors;
    prepared.content.outputs = tensors;
    prepareAllReduce(prepared, tensor, opts);
    return begin({c10d::OpType::ALLREDUCE, "pycomm:all_reduce"}, std::move(prepared));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::allreduce_sparse(
    std::vector<at::Tensor>& tensors,
    const c10d::AllreduceOptions& opts) {
  return allreduce(tensors, opts);
}

c10::intrusive_ptr<c10d::Work> PycommBackend::allreduceAs(
    Codec codec,
    std::vector<at::Tensor> tensors,
    const at::Tensor& residual,
    const c10d::AllreduceOptions& opts) {
  return raising([&] {
    const at::Tensor& tensor = onlyTensor(tensors, "all_reduce");
    checkOutput(tensor, "all_reduce");
    ScheduleRequest asked = call(Collective::AllReduce, opts, tensor).schedule;
    asked.numel = tensor.numel();
    const Codec travels_as = codecFor(asked, codec);
    if (residual.defined()) {
      checkResidual(tensor, residual, asked.reduce_op);
      if (travels_as == Codec::None) {
        addResidual(tensor, residual);
      }
    }
    Prepared prepared = prepare(codec);
    prepared.content.inputs = tensors;
    prepared.content.outputs = tensors;
    prepareAllReduce(prepared, tensor, opts);
    Group::Call& request = prepared.calls.back();
    request.schedule.codec = travels_as;
    if (residual.defined()) {
      request.residual = {static_cast<std::byte*>(residual.data_ptr()), residual.nbytes()};
      prepared.content.keep_alive.push_back(residual);
    }
    return begin({c10d::OpType::ALLREDUCE, "pycomm:all_reduce"}, std::move(prepared));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::allreduce_coalesced(
    std::vector<at::Tensor>& tensors,
    const c10d::AllreduceCoalescedOptions& opts) {
  return leaving([&] {
    return raising([&] {
      for (const at::Tensor& tensor : tensors) {
        checkOutput(tensor, "all_reduce_coalesced");
      }
      Prepared prepared = prepare();
      prepared.content.inputs = tensors;
      prepared.content.outputs = tensors;
      for (const at::Tensor& tensor : tensors) {
        prepareAllReduce(prepared, tensor, opts);
      }
      return begin({c10d::OpType::ALLREDUCE_COALESCED, "pycomm:all_reduce_coalesced"}, std::move(prepared));
    });
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::broadcast(
    std::vector<at::Tensor>& tensors,
    const c10d::BroadcastOptions& opts) {
  return raising([&] {
    const at::Tensor& tensor = onlyTensor(tensors, "broadcast");
    const bool root = getRank() == opts.rootRank;
    checkOutput(tensor, "broadcast"); // also the root's, which is not written: all ranks must refuse alike
    Prepared prepared = prepare();
    prepared.content.inputs = tensors;
    prepared.content.outputs = tensors;
    Group::Call request = call(Collective::Broadcast, opts, tensor);
    request.schedule.numel = tensor.numel();
    request.output = root ? prepared.staging.in(tensor) : prepared.staging.out(tensor); // the root's is not written
    request.input = request.output;
    prepared.calls.push_back(std::move(request));
    return begin({c10d::OpType::BROADCAST, "pycomm:broadcast"}, std::move(prepared));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::reduce(
    std::vector<at::Tensor>& tensors,
    const c10d::ReduceOptions& opts) {
  return raising([&] {
    const at::Tensor& tensor = onlyTensor(tensors, "reduce");
    const bool root = getRank() == opts.rootRank;
    if (root) {
      checkOutput(tensor, "reduce");
    } else {
      checkTensor(tensor, "reduce", "input");
    }
    Prepared prepared = prepare();
    prepared.content.inputs = tensors;
    prepared.content.outputs = tensors;
    Group::Call request = call(Collective::Reduce, opts, tensor);
    request.schedule.numel = tensor.numel();
    if (root) {
      request.output = prepared.staging.inOut(tensor);
      request.input = request.output;
    } else {
      request.input = prepared.staging.in(tensor);
    }
    prepared.calls.push_back(std::move(request));
    return begin({c10d::OpType::REDUCE, "pycomm:reduce"}, std::move(prepared));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::barrier(const c10d::BarrierOptions& opts) {
  return raising([&] {
    Prepared prepared = prepare();
    prepared.calls.push_back(call(Collective::Barrier, opts));
    return begin({c10d::OpType::BARRIER, "pycomm:barrier"}, std::move(prepared));
  });
}

} // namespace pycomm
