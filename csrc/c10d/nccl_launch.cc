// What a Work knows of its launch by NCCL.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "c10d/cuda_nccl.h"

namespace pycomm {

NcclLaunch::NcclLaunch(std::shared_ptr<NcclGroup> group)
    : group_(std::move(group)), end_(group_->device().device().type()) {}

void NcclLaunch::requireLaunched() const {
  if (!launched_.load(std::memory_order_acquire)) {
    throw Error(
        ErrorCode::InvalidArgument,
        "The future of an operation was asked for within its coalescing manager, whose end begins it.",
        "leave the manager first, and take what it gives");
  }
}

void NcclLaunch::finish(const std::function<void()>& unpack) {
  if (unpack) {
    const c10::StreamGuard on_side_stream(stream());
    unpack();
  }
  end_.record(stream());
}

// Within a coalescing manager there is nothing yet that a stream could wait for; but torch waits there for calls that are not
// asynchronous, and means no more by it than that they are collected.
void NcclLaunch::orderCaller() const {
  if (!launched_.load(std::memory_order_acquire)) {
    return;
  }
  end_.block(c10::impl::VirtualGuardImpl(stream().device_type()).getStream(stream().device()));
}

c10::Stream NcclLaunch::stream() const {
  return group_->device().in();
}

void NcclLaunch::keepFor(const std::vector<at::Tensor>& tensors) const {
  keepForStream(tensors, stream());
}

} // namespace pycomm
