// Point-to-point.
#include <utility>

#include "c10d/backend.h"
#include "c10d/dtypes.h"
#include "c10d/raising.h"
#include "c10d/tensor_checks.h"
#include "engine/point_to_point.h"

namespace pycomm {

c10::intrusive_ptr<c10d::Work> PycommBackend::message(
    Titled titled,
    Collective kind,
    std::vector<at::Tensor>& tensors,
    int peer,
    int tag) {
  return raising([&] {
    const bool sends = kind == Collective::Send;
    const at::Tensor& tensor = onlyTensor(tensors, collectiveName(kind));
    checkTensor(tensor, collectiveName(kind), sends ? "input" : "output");
    Group::Call request;
    request.schedule.kind = kind;
    request.schedule.dtype = toDType(tensor.scalar_type());
    request.schedule.wire_dtype = request.schedule.dtype;
    request.schedule.numel = tensor.numel();
    request.deadline = Deadline::after(settings_.timeout.count());
    request.peer = peer;
    request.tag = static_cast<uint32_t>(tag);
    if (sends) {
      request.input = viewOf(tensor);
    } else {
      request.output = viewOf(tensor);
    }
    PycommWork::Content content;
    content.inputs = tensors;
    content.outputs = tensors;
    content.operations.push_back(start(request));
    return work(titled, std::move(content));
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::send(std::vector<at::Tensor>& tensors, int dst, int tag) {
  return message({c10d::OpType::SEND, "pycomm:send"}, Collective::Send, tensors, dst, tag);
}

c10::intrusive_ptr<c10d::Work> PycommBackend::recv(std::vector<at::Tensor>& tensors, int src, int tag) {
  return message({c10d::OpType::RECV, "pycomm:recv"}, Collective::Recv, tensors, src, tag);
}

c10::intrusive_ptr<c10d::Work> PycommBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return message(
      {c10d::OpType::RECVANYSOURCE, "pycomm:recv_any_source"}, Collective::Recv, tensors, PointToPoint::kAnyRank, tag);
}

} // namespace pycomm
