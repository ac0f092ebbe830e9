#include "ddp/bucket.h"

#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <string>
#include <utility>

#include "c10d/call_tag.h"

namespace pycomm {
namespace {

size_t numelOf(const std::vector<ReducedParam>& params, const std::vector<size_t>& indices) {
  size_t numel = 0;
  for (const size_t index : indices) {
    numel += static_cast<size_t>(params.at(index).tensor.numel());
  }
  return numel;
}

} // namespace

Bucket::Bucket(
    const WireContext& context,
    const std::vector<ReducedParam>& params,
    const std::vector<size_t>& indices,
    int exponent,
    uint32_t tag,
    FlatMemory& source)
    : wire_(makeWire(context, params.at(indices.at(0)), numelOf(params, indices), exponent)),
      memory_(
          params,
          indices,
          {wire_->castTo(), wire_->tail(), context.options.gradient_as_bucket_view, wire_->inPlace()},
          source),
      packer_(makePacker(memory_, context.options.cuda_library)),
      rank_(context.group.rank()),
      tag_(tag) {
  beginStep(context.group.size());
}

size_t Bucket::wireNbytes() const {
  return wire_->nbytes(memory_.travelling());
}

void Bucket::beginStep(int divisor) {
  divisor_ = divisor;
  ratio_ = 1.0;
  pending_ = slots().size();
  ahead_.clear();
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
  noteStream();
  --pending_;
  if (packsZeros()) {
    return; // seal() packs them
  }
  keepOld(slot, unused);
  packer_->pack(memory_, slots()[slot], packFactor());
}

// At once, although the factor is only guessed: the gradient is in the cache now, and a tensor that moves home leaves its memory to the next one.
void Bucket::packAhead(size_t slot, bool unused, bool counts) {
  const at::NoGradGuard no_grad;
  noteStream();
  if (!counts) {
    ahead_.push_back({slot, 0.0});
    return;
  }
  keepOld(slot, unused);
  ahead_.push_back({slot, packer_->packAhead(memory_, slots()[slot], packFactor())});
}

void Bucket::setRatio(double ratio) {
  const at::NoGradGuard no_grad;
  ratio_ = ratio;
  pending_ -= ahead_.size();
  if (!packsZeros()) { // else seal() packs them
    for (const Ahead& each : ahead_) {
      if (each.factor != packFactor()) {
        streams_differed_ = joinStreams() || streams_differed_;
        packer_->repack(memory_, slots()[each.slot], each.factor, packFactor());
      }
    }
  }
  ahead_.clear();
}

void Bucket::keepOld(size_t slot, bool unused) {
  const bool overwrites = memory_.gradsAreViews() && !memory_.cast.defined() && !memory_.sparse(); // .grad travels
  if (const at::Tensor& grad = slots()[slot].param.grad();
      unused && (wire_->encodes() || overwrites) && grad.defined()) {
    old_grads_[slot] = grad.clone();
  }
}

void Bucket::seal() {
  const at::NoGradGuard no_grad;
  const bool streams_differ = joinStreams() || std::exchange(streams_differed_, false);
  if (packsZeros()) {
    packer_->packZeros(memory_);
  } else {
    packer_->seal(memory_, packFactor(), streams_differ);
  }
  if (memory_.tail.defined()) {
    packer_->writeMagnitude(memory_, rank_, ratio_);
  }
}

// Autograd makes each gradient on the stream of its forward operation.
void Bucket::noteStream() {
  if (memory_.device().is_cpu()) {
    return;
  }
  const c10::Stream stream = currentStream(memory_.device());
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
    streams_.push_back(stream);
  }
}

/// Makes the current stream wait for those. True if one of them is another.
bool Bucket::joinStreams() {
  bool differ = false;
  for (const c10::Stream& stream : streams_) {
    const c10::Stream here = currentStream(memory_.device());
    if (stream != here) {
      differ = true;
      c10::Event event(here.device_type());
      event.record(stream);
      event.block(here);
    }
  }
  streams_.clear();
  return differ;
}

uint32_t Bucket::tagWith(uint32_t checksum) const {
  return CallTag::of(std::to_string(checksum), tag_);
}

c10::intrusive_ptr<c10d::Work> Bucket::allReduce(const ReducerGroup& group) {
  return wire_->allReduce(group, memory_.travelling());
}

Verdict Bucket::judge() {
  const Verdict verdict = wire_->judge(memory_.tail);
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
  if (!memory_.sparse()) {
    return memory_.travelling();
  }
  const at::Tensor& sums = memory_.home.defined() ? memory_.home : slots().front().param.grad();
  return sums.defined() && sums.is_sparse() ? sums._values() : sums;
}

bool Bucket::canWrite() const {
  return wire_->accepts(memory_.tail);
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

void Bucket::takeBack(const std::vector<size_t>& slots, bool adds_sum) {
  const at::NoGradGuard no_grad;
  for (const size_t index : slots) {
    const Slot& slot = memory_.slots[index];
    const auto found = old_grads_.find(index);
    const at::Tensor old = found == old_grads_.end() ? at::Tensor() : found->second;
    if (wire_->residual().defined()) {
      at::Tensor residual = BucketMemory::partOf(wire_->residual(), slot);
      if (old.defined()) {
        residual.sub_(old.to(residual.options()), packFactor());
      }
      if (adds_sum) {
        residual.add_(BucketMemory::partOf(memory_.travelling(), slot).to(residual.options()));
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
