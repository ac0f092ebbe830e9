#include "ddp/leader_state.h"

#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/wait_point.h"
#include "c10d/call_tag.h"

namespace pycomm {
namespace {

/// Each buffer begins at a multiple of it.
constexpr size_t kAlignment = 16;

size_t padded(size_t nbytes) {
  return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// Contiguous memory at `begin` as a tensor like this buffer.
at::Tensor imageOf(const at::Tensor& buffer, uint8_t* begin) {
  return at::from_blob(begin, buffer.sizes(), at::TensorOptions(at::kCPU).dtype(buffer.dtype()));
}

} // namespace

void LeaderState::launch(const ReducerGroup& group, const std::optional<std::vector<size_t>>& order) {
  const at::NoGradGuard no_grad;
  order_count_ = order.has_value() ? order->size() : 0;
  size_t nbytes = padded(order_count_ * sizeof(int64_t));
  for (const at::Tensor& buffer : buffers_) {
    nbytes += padded(buffer.nbytes());
  }
  bytes_.reset();
  work_.reset();
  if (nbytes == 0) {
    return;
  }
  bytes_ = at::zeros({static_cast<int64_t>(nbytes)}, at::kByte);
  if (group.rank() == 0) {
    auto* out = static_cast<uint8_t*>(bytes_.mutable_data_ptr());
    if (order.has_value()) {
      std::copy(order->begin(), order->end(), reinterpret_cast<int64_t*>(out));
    }
    out += padded(order_count_ * sizeof(int64_t));
    for (const at::Tensor& buffer : buffers_) {
      imageOf(buffer, out).copy_(buffer);
      out += padded(buffer.nbytes());
    }
  }
  std::vector<at::Tensor> tensors{bytes_};
  const CallTag about(CallTag::of("rank 0's buffers and order of buckets"));
  work_ = group.get()->broadcast(tensors);
}

void LeaderState::await() {
  if (work_ != nullptr) {
    beforeWait();
    work_->wait();
    work_.reset();
  }
}

std::optional<std::vector<size_t>> LeaderState::commit() {
  if (!bytes_.defined()) {
    return std::nullopt;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor bytes = std::exchange(bytes_, {});
  auto* in = static_cast<uint8_t*>(bytes.mutable_data_ptr());
  std::optional<std::vector<size_t>> order;
  if (order_count_ > 0) {
    const auto* first = reinterpret_cast<const int64_t*>(in);
    order.emplace(first, first + order_count_);
  }
  in += padded(order_count_ * sizeof(int64_t));
  for (const at::Tensor& buffer : buffers_) {
    // Past the version counter, as torch's wrapper does it: a graph that was kept may have saved the buffer.
    buffer.variable_data().copy_(imageOf(buffer, in));
    in += padded(buffer.nbytes());
  }
  return order;
}

} // namespace pycomm
