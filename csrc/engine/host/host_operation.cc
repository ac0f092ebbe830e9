#include "engine/host/host_operation.h"

#include <cstring>
#include <utility>

#include "numeric/reduce.h"

namespace pycomm {

HostOperation::HostOperation(const HostView& shared, std::shared_ptr<Operation> of, uint64_t its_ticket)
    : view(shared), operation(std::move(of)), ticket(its_ticket) {
  const Descriptor& descriptor = request().descriptor;
  kind = descriptor.kind;
  element_nbytes = elementSize(descriptor.dtype);
  numel = kind == Collective::Barrier ? 0 : descriptor.numel;
  scales = descriptor.reduce_op == ReduceOp::PremulSum;
}

const std::byte* HostOperation::inputPart(int of) const noexcept {
  return request().extras().input_parts.empty() ? request().input.ptr + nbytesOf(of * numel)
                                                : request().extras().input_parts[static_cast<size_t>(of)].ptr;
}

std::byte* HostOperation::outputPart(int of) const noexcept {
  return request().extras().output_parts.empty() ? request().output.ptr + nbytesOf(of * numel)
                                                 : request().extras().output_parts[static_cast<size_t>(of)].ptr;
}

void HostOperation::copy(std::byte* to, const std::byte* from, size_t nbytes) noexcept {
  if (nbytes > 0 && to != from) {
    std::memcpy(to, from, nbytes);
  }
}

void HostOperation::give(std::byte* to, const std::byte* from, int64_t elements) const {
  if (scales) {
    scale(request().descriptor.dtype, to, from, static_cast<size_t>(elements), request().extras().premul_factor);
  } else {
    copy(to, from, nbytesOf(elements));
  }
}

void HostOperation::fold(std::byte* to, const Sources& sources, int64_t elements) const {
  const Descriptor& descriptor = request().descriptor;
  reduceMany(
      descriptor.dtype,
      descriptor.reduce_op,
      to,
      sources.data(),
      static_cast<size_t>(view.size),
      static_cast<size_t>(elements),
      descriptor.reduce_op == ReduceOp::Avg ? view.size : 1);
}

} // namespace pycomm
