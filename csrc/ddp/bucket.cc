#include "ddp/bucket.h"

#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>

namespace pycomm {
namespace {

size_t numelOf(const std::vector<at::Tensor>& params, const std::vector<size_t>& indices) {
  size_t numel = 0;
  for (const size_t index : indices) {
    numel += static_cast<size_t>(params.at(index).numel());
  }
  return numel;
}

} // namespace

Bucket::Bucket(
    const std::vector<at::Tensor>& params,
    const std::vector<size_t>& indices,
    const BucketOptions& options,
    FlatMemory& source)
    : wire_(makeWire(options.wire, params.at(indices.at(0)).scalar_type(), numelOf(params, indices))),
      memory_(
          params,
          indices,
          {wire_->castTo(), wire_->tail(), options.grads_are_views, options.wire.sparse, wire_->inPlace()},
          source),
      packer_(makePacker(memory_, wire_->tail() > 0, options.cuda_library)),
      rank_(options.wire.rank),
      encodes_(options.wire.codec != Codec::None && !options.wire.sparse) {
  if (!memory_.device().is_cpu()) {
    streams_.emplace(memory_.device());
  }
  beginStep(options.wire.world_size);
}

at::Tensor Bucket::residualOf(const Slot& slot) const {
  return wire_->residual().as_strided(slot.param.sizes(), slot.strides, static_cast<int64_t>(slot.offset));
}

size_t Bucket::wireNbytes() const {
  return wire_->nbytes(memory_.travelling());
}

void Bucket::beginStep(int divisor, double ratio) {
  divisor_ = divisor;
  ratio_ = ratio;
  pending_ = slots().size();
  shadow_ = false;
  old_grads_.clear();
  packer_->begin();
}

void Bucket::beginShadowStep(int divisor) {
  const at::NoGradGuard no_grad;
  beginStep(divisor);
  shadow_ = true;
  pending_ = 0;
}

void Bucket::pack(size_t slot, bool unused) {
  const at::NoGradGuard no_grad;
  if (streams_.has_value()) {
    streams_->note();
  }
  --pending_;
  if (packsZeros()) {
    return; // seal() packs them
  }
  if (const at::Tensor& grad = slots()[slot].param.grad(); encodes_ && unused && grad.defined()) {
    old_grads_[slot] = grad.clone();
  }
  packer_->pack(memory_, slots()[slot], packFactor());
}

void Bucket::seal() {
  const at::NoGradGuard no_grad;
  const bool streams_differ = streams_.has_value() && streams_->join();
  if (packsZeros()) {
    packer_->packZeros(memory_);
  } else {
    packer_->seal(memory_, packFactor(), streams_differ);
  }
  wire_->seal(memory_.tail(), *packer_, ratio_);
}

c10::intrusive_ptr<c10d::Work> Bucket::allReduce(c10d::ProcessGroup& group) const {
  return wire_->allReduce(group, memory_.travelling());
}

Verdict Bucket::judge() {
  const Verdict verdict = wire_->judge(memory_.tail());
  if (verdict == Verdict::Good || verdict == Verdict::NonFinite) {
    return verdict;
  }
  // The local gradients are still where they were: write() overwrites them.
  const at::NoGradGuard no_grad;
  packer_->begin();
  if (!packsZeros()) {
    for (const Slot& slot : slots()) {
      packer_->pack(memory_, slot, packFactor());
    }
  }
  seal();
  return verdict;
}

at::Tensor Bucket::sums() const {
  return memory_.sparse() ? memory_.home._values() : memory_.travelling();
}

bool Bucket::canWrite() const {
  return !streams_.has_value() && wire_->accepts(memory_.tail());
}

void Bucket::takeResult(const at::Tensor& result) {
  if (shadow_) {
    return; // nothing is unpacked
  }
  const at::NoGradGuard no_grad;
  packer_->takeResult(memory_, result);
}

void Bucket::write(const std::vector<size_t>& slots) {
  const at::NoGradGuard no_grad;
  packer_->unpack(memory_, shadow_ ? std::vector<size_t>{} : slots, wire_->unpackFactor(divisor_));
}

void Bucket::takeBack(const std::vector<size_t>& slots) {
  if (!encodes_) {
    return;
  }
  const at::NoGradGuard no_grad;
  for (const size_t index : slots) {
    const Slot& slot = memory_.slots[index];
    const auto found = old_grads_.find(index);
    const at::Tensor old = found == old_grads_.end() ? at::Tensor() : found->second;
    if (wire_->residual().defined()) {
      at::Tensor residual = residualOf(slot);
      if (old.defined()) {
        residual.sub_(old.to(residual.options()), packFactor());
      }
      if (rank_ == 0) {
        residual.add_(memory_.travelling()
                          .as_strided(slot.param.sizes(), slot.strides, static_cast<int64_t>(slot.offset))
                          .to(residual.options()));
      }
      residual.nan_to_num_(0.0, 0.0, 0.0); // an old .grad may hold one, which error feedback would never be rid of
    }
    if (old.defined() && !memory_.cast.defined() && BucketMemory::isHome(slot.param.grad(), slot)) {
      memory_.slots[index].view.copy_(old);
    }
  }
  old_grads_.clear();
}

} // namespace pycomm
