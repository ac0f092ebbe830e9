#include "c10d/backend.h"

#include <utility>

#include "c10d/dtypes.h"
#include "c10d/raising.h"
#include "c10d/tensor_checks.h"
#include "c10d/torch_compat.h"

namespace pycomm {
PycommBackend::PycommBackend(std::shared_ptr<Store> store, std::shared_ptr<Group> group, Settings settings)
    : Backend(group->identity().rank, group->identity().size),
      store_(std::move(store)),
      group_(std::move(group)),
      settings_(settings) {}

PycommBackend::~PycommBackend() {
  // Here, on a user's thread, and not with the last reference, which the lane may hold.
  group_->close();
}

c10::intrusive_ptr<c10d::Backend::Options> PycommBackend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>("pycomm", settings_.timeout);
  options->group_name = group_->identity().name;
  return options;
}

void PycommBackend::setTimeout(std::chrono::milliseconds timeout) {
  settings_.timeout = timeout;
}

c10d::ErrorType PycommBackend::getError() {
  const auto failure = group_->failure();
  if (!failure) {
    return c10d::ErrorType::SUCCESS;
  }
  if (failure->code == ErrorCode::Timeout) {
    return c10d::ErrorType::TIMEOUT;
  }
  return failure->peer >= 0 && failure->peer != getRank() ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::COMM_ERROR;
}

void PycommBackend::abort() {
  ErrorRecord reason;
  reason.code = ErrorCode::Aborted;
  reason.peer = getRank();
  reason.summary = "Rank " + std::to_string(getRank()) + " aborted the process group.";
  group_->abort(reason);
}

void PycommBackend::shutdown() {
  group_->close();
}

uint64_t PycommBackend::getSequenceNumberForGroup() {
  return static_cast<uint64_t>(group_->operationsIssued());
}

std::shared_ptr<Operation> PycommBackend::start(const Group::Call& call) {
  return group_->start(call);
}

c10::intrusive_ptr<c10d::Work> PycommBackend::work(Titled titled, PycommWork::Content content) {
  return c10::make_intrusive<PycommWork>(group_, getRank(), titled.type, titled.title, std::move(content));
}

std::shared_ptr<Operation> PycommBackend::startAllReduce(at::Tensor& tensor, const c10d::AllreduceOptions& opts) {
  Group::Call request = call(Collective::AllReduce, opts);
  request.schedule.algorithm = settings_.algorithm;
  request.schedule.dtype = toDType(tensor.scalar_type());
  request.schedule.wire_dtype = request.schedule.dtype;
  request.schedule.reduce_op = toReduceOp(opts.reduceOp);
  request.schedule.numel = tensor.numel();
  request.premul_factor = premulFactor(opts.reduceOp);
  request.input = viewOf(tensor);
  request.output = viewOf(tensor);
  return start(request);
}

c10::intrusive_ptr<c10d::Work> PycommBackend::allreduce(
    std::vector<at::Tensor>& tensors,
    const c10d::AllreduceOptions& opts) {
  return raising([&] {
    at::Tensor& tensor = onlyTensor(tensors, "all_reduce");
    checkTensor(tensor, "all_reduce", "input");
    PycommWork::Content content;
    content.inputs = tensors;
    content.outputs = tensors;
    content.operations.push_back(startAllReduce(tensor, opts));
    return work({c10d::OpType::ALLREDUCE, "pycomm:all_reduce"}, std::move(content));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::allreduce_coalesced(
    std::vector<at::Tensor>& tensors,
    const c10d::AllreduceCoalescedOptions& opts) {
  return raising([&] {
    for (const at::Tensor& tensor : tensors) {
      checkTensor(tensor, "all_reduce_coalesced", "input");
    }
    PycommWork::Content content;
    content.inputs = tensors;
    content.outputs = tensors;
    for (at::Tensor& tensor : tensors) {
      content.operations.push_back(startAllReduce(tensor, opts));
    }
    return work({c10d::OpType::ALLREDUCE_COALESCED, "pycomm:all_reduce_coalesced"}, std::move(content));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::broadcast(
    std::vector<at::Tensor>& tensors,
    const c10d::BroadcastOptions& opts) {
  return raising([&] {
    at::Tensor& tensor = onlyTensor(tensors, "broadcast");
    checkTensor(tensor, "broadcast", "input");
    Group::Call request = call(Collective::Broadcast, opts);
    request.schedule.dtype = toDType(tensor.scalar_type());
    request.schedule.wire_dtype = request.schedule.dtype;
    request.schedule.root = static_cast<int32_t>(opts.rootRank);
    request.schedule.numel = tensor.numel();
    request.input = viewOf(tensor);
    request.output = viewOf(tensor);
    PycommWork::Content content;
    content.inputs = tensors;
    content.outputs = tensors;
    content.operations.push_back(start(request));
    return work({c10d::OpType::BROADCAST, "pycomm:broadcast"}, std::move(content));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::reduce(
    std::vector<at::Tensor>& tensors,
    const c10d::ReduceOptions& opts) {
  return raising([&] {
    at::Tensor& tensor = onlyTensor(tensors, "reduce");
    checkTensor(tensor, "reduce", "input");
    Group::Call request = call(Collective::Reduce, opts);
    request.schedule.dtype = toDType(tensor.scalar_type());
    request.schedule.wire_dtype = request.schedule.dtype;
    request.schedule.reduce_op = toReduceOp(opts.reduceOp);
    request.schedule.root = static_cast<int32_t>(opts.rootRank);
    request.schedule.numel = tensor.numel();
    request.premul_factor = premulFactor(opts.reduceOp);
    request.input = viewOf(tensor);
    request.output = viewOf(tensor);
    PycommWork::Content content;
    content.inputs = tensors;
    content.outputs = tensors;
    content.operations.push_back(start(request));
    return work({c10d::OpType::REDUCE, "pycomm:reduce"}, std::move(content));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::barrier(const c10d::BarrierOptions& opts) {
  return raising([&] {
    PycommWork::Content content;
    content.operations.push_back(start(call(Collective::Barrier, opts)));
    return work({c10d::OpType::BARRIER, "pycomm:barrier"}, std::move(content));
  });
}

} // namespace pycomm
