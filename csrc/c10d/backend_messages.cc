// Point-to-point.
#include <ATen/record_function.h>

#include <utility>

#include "c10d/backend.h"
#include "c10d/raising.h"
#include "c10d/tensor_checks.h"
#include "engine/data/point_to_point.h"
#include "schedule/make_schedule.h"

namespace pycomm {
namespace {

/// torch has none for messages: it passes the peer and the tag alone.
struct MessageOptions {
  std::chrono::milliseconds timeout;
  bool asyncOp = true;
};

/// The engine works in its own memory.
bool needsNoCopy(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

} // namespace

c10::intrusive_ptr<c10d::Work> PycommBackend::plainMessage(
    Titled titled,
    Collective kind,
    const at::Tensor& tensor,
    int peer,
    int tag) {
  Group::Call request = call(kind, MessageOptions{settings_.timeout}, tensor);
  request.schedule.numel = tensor.numel();
  request.peer = peer;
  request.tag = static_cast<uint32_t>(tag);
  const BufferView view(static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes());
  if (kind == Collective::Send) {
    request.input = view;
  } else {
    request.output = view;
  }
  auto made = c10::make_intrusive<MessageWork>(owner_, getRank(), titled.type, tensor);
  made->started(start(request));
  return made;
}

c10::intrusive_ptr<c10d::Work> PycommBackend::message(
    Titled titled,
    Collective kind,
    std::vector<at::Tensor>& tensors,
    int peer,
    int tag) {
  return raising([&] {
    const bool sends = kind == Collective::Send;
    const at::Tensor& tensor = onlyTensor(tensors, collectiveName(kind));
    if (sends) {
      checkTensor(tensor, collectiveName(kind), "input");
    } else {
      checkOutput(tensor, collectiveName(kind));
    }
    if (needsNoCopy(tensor) && call_sites_ == nullptr && window() == nullptr && !at::hasCallbacks()) {
      return plainMessage(titled, kind, tensor, peer, tag);
    }
    Prepared prepared(
        devices_, false, Deadline::never()); // messages have no order that all ranks share, which NCCL needs
    prepared.content.inputs = tensors;
    prepared.content.outputs = tensors;
    Group::Call request = call(kind, MessageOptions{settings_.timeout}, tensor);
    request.schedule.numel = tensor.numel();
    request.peer = peer;
    request.tag = static_cast<uint32_t>(tag);
    if (sends) {
      request.input = prepared.staging.in(tensor);
    } else {
      request.output = prepared.staging.out(tensor);
    }
    prepared.calls.push_back(request);
    return begin(titled, std::move(prepared));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::send(std::vector<at::Tensor>& tensors, int dst, int tag) {
  return message({c10d::OpType::SEND, "pycomm:send"}, Collective::Send, tensors, dst, tag);
}

c10::intrusive_ptr<c10d::Work> PycommBackend::recv(std::vector<at::Tensor>& tensors, int src, int tag) {
  if (src < 0) { // torch hands on what the program passed, and to the engine a negative number may mean any rank
    raising([&] {
      ScheduleRequest asked = call(Collective::Recv, MessageOptions{settings_.timeout}).schedule;
      asked.root = src;
      checkRequest(asked);
    });
  }
  return message({c10d::OpType::RECV, "pycomm:recv"}, Collective::Recv, tensors, src, tag);
}

c10::intrusive_ptr<c10d::Work> PycommBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return message(
      {c10d::OpType::RECVANYSOURCE, "pycomm:recvAnySource"}, Collective::Recv, tensors, PointToPoint::kAnyRank, tag);
}

} // namespace pycomm
