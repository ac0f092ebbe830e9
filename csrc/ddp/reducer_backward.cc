// One backward pass of a reducer: from the first gradient to the last average.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>

#include <utility>

#include "c10d/call_tag.h"
#include "c10d/raising.h"
#include "ddp/comm_hook.h"
#include "ddp/reducer.h"

namespace pycomm {

void Reducer::onGradient(size_t index) {
  raising([&] {
    const std::lock_guard lock(mutex_);
    try {
      takeGradient(index);
    } catch (const std::exception& error) {
      fail("the gradient of parameter '" + params_[index].name + "' was being reduced", error);
      throw;
    }
  });
}

void Reducer::takeGradient(size_t index) {
  const at::Tensor& grad = params_[index].tensor.grad();
  if (grad.defined()) {
    const bool sparse = grad.layout() == at::kSparse;
    TORCH_CHECK(
        sparse == params_[index].sparse,
        "parameter '",
        params_[index].name,
        "' got a ",
        sparse ? "sparse" : "dense",
        " gradient; every rank expects it to be ",
        sparse ? "dense: only those of embeddings with sparse=True may be sparse"
               : "sparse, as those of an embedding with sparse=True are");
    if (tracksUse() && !used_known_) {
      used_.mutable_data_ptr<int32_t>()[index] = 1; // also inside no_sync(): the reduction after it covers it
    }
  }
  if (pass_ == Pass::Armed) {
    beginPass();
  }
  if (countingStaticGraph()) {
    ++arrivals_[index];
    arrival_.push_back(index);
    return; // delayAllReduce() goes on
  }
  if (pass_ != Pass::Reducing) {
    return;
  }
  if (static_graph_ && awaited_[index] > 1) {
    --awaited_[index];
    return;
  }
  finishEarly();
  markReady(index);
  launchComplete();
  if (next_bucket_ == buckets_.size()) {
    queueFinish();
  }
}

void Reducer::beginPass() {
  ++stats_.passes;
  for (const Bucket& bucket : buckets_) {
    stats_.gradient_nbytes += static_cast<int64_t>(bucket.gradientNbytes());
  }
  if (++stats_.accumulated < options_.accumulate) {
    pass_ = Pass::Local;
    return;
  }
  stats_.accumulated = 0;
  pass_ = Pass::Reducing;
  takeDivisor();
  if (countingStaticGraph()) {
    return;
  }
  awaited_ = arrivals_;
  for (const size_t unreachable : unreachable_) {
    markReady(unreachable);
  }
}

void Reducer::takeDivisor() {
  if (join_work_ == nullptr) {
    return;
  }
  const auto future = std::exchange(join_work_, nullptr)->getFuture();
  future->waitAndThrow();
  divisor_ = future->value().toTensorVector().at(0).item<int>();
  for (Bucket& bucket : buckets_) {
    bucket.beginStep(divisor_);
  }
}

void Reducer::delayAllReduce() {
  raising([&] {
    const std::lock_guard lock(mutex_);
    if (!countingStaticGraph()) {
      return;
    }
    static_graph_known_ = true;
    unreachable_.clear();
    for (size_t index = 0; index < params_.size(); ++index) {
      if (trainable_[index] && arrivals_[index] == 0) {
        unreachable_.push_back(index);
      }
    }
    if (pass_ != Pass::Reducing) {
      return; // accumulating, or inside no_sync()
    }
    try {
      for (const auto& indices : bucket_indices_) {
        for (const size_t index : indices) {
          markReady(index);
        }
      }
      launchComplete();
    } catch (const std::exception& error) {
      fail("the first gradients of a static graph were being reduced", error);
      throw;
    }
  });
  finish();
}

void Reducer::markReady(size_t index) {
  TORCH_CHECK(
      !ready_[index],
      "parameter '",
      params_[index].name,
      "' got a second gradient in one backward pass. ",
      static_graph_ ? "The graph is not the one of the first pass: leave static_graph=True out."
                    : "Either it is used again by a checkpointed part of the model (use torch.utils.checkpoint with "
                      "use_reentrant=False, or static_graph=True), or forward's output did not lead to it and "
                      "find_unused_parameters=True counted it as unused.");
  ready_[index] = true;
  if (!reduced_once_ && !static_graph_) {
    arrival_.push_back(index);
  }
  const Place place = places_[index];
  if (record_ != nullptr) {
    StepRecord::Bucket& bucket = record_->buckets[place.bucket];
    const int64_t now = nowNs();
    record_->first_gradient_ns = record_->first_gradient_ns == 0 ? now : record_->first_gradient_ns;
    bucket.first_gradient_ns = bucket.first_gradient_ns == 0 ? now : bucket.first_gradient_ns;
  }
  buckets_[place.bucket].pack(place.slot);
}

void Reducer::noteLaunch(size_t index) {
  if (record_ == nullptr) {
    return;
  }
  StepRecord::Bucket& bucket = record_->buckets[index];
  bucket.gradient_nbytes = static_cast<int64_t>(buckets_[index].gradientNbytes());
  bucket.wire_nbytes = static_cast<int64_t>(buckets_[index].wireNbytes());
  bucket.launched_ns = nowNs();
  const auto future = launched_[index].future ? launched_[index].future : launched_[index].work->getFuture();
  future->addCallback([record = record_, index](c10::ivalue::Future& /*future*/) {
    record->buckets[index].reduced_ns.store(nowNs(), std::memory_order_release);
  });
}

void Reducer::launchComplete() {
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending() == 0) {
    launch(next_bucket_++);
    if (next_bucket_ == buckets_.size()) {
      launchUsedMap();
    }
  }
}

void Reducer::launch(size_t index) {
  Bucket& bucket = buckets_[index];
  bucket.seal();
  stats_.wire_nbytes += static_cast<int64_t>(bucket.wireNbytes());
  ++stats_.buckets_reduced;
  if (hook_ != nullptr) {
    c10d::GradBucket grad_bucket = gradBucketOf(bucket, index, buckets_.size());
    launched_[index].future = hook_->runHook(grad_bucket);
  } else {
    const CallTag about(tags_[index]);
    launched_[index].work = allReduce(bucket);
  }
  noteLaunch(index);
}

c10::intrusive_ptr<c10d::Work> Reducer::allReduce(Bucket& bucket) {
  std::vector<at::Tensor> tensors{bucket.wire()};
  if (bucket.codec() == Codec::None) {
    return group_->allreduce(tensors);
  }
  return codec_backend_->allreduceAs(bucket.codec(), std::move(tensors), bucket.lost());
}

void Reducer::launchUsedMap() {
  if (!tracksUse() || used_known_) {
    return;
  }
  used_anywhere_ = used_.to(ownDevice(*group_), /*non_blocking=*/false, /*copy=*/true);
  std::vector<at::Tensor> tensors{used_anywhere_};
  const CallTag about(CallTag::of("which parameters are used"));
  used_work_ = group_->allreduce(tensors);
}

void Reducer::queueFinish() {
  // Callbacks run when the whole graph has. Queued from within a callback, so that it comes after those that were
  // queued before, which may still produce gradients.
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.queue_callback([self = shared_from_this(), &engine] { engine.queue_callback([self] { self->finish(); }); });
}

void Reducer::finish() {
  raising([&] {
    const std::lock_guard lock(mutex_);
    if (pass_ != Pass::Reducing || next_bucket_ != buckets_.size()) {
      return; // of a static graph whose first pass was local
    }
    if (record_ != nullptr) {
      record_->backward_ended_ns = nowNs();
    }
    finishBuckets(true);
    if (record_ != nullptr) {
      record_->ended_ns = nowNs();
      last_step_ = std::exchange(record_, nullptr);
    }
    ++stats_.steps;
    reduced_once_ = true;
    resetStep();
  });
}

// What the network is done with already. A gradient that travels cast stays in memory of its own until its average is in
// .grad: given back now, that memory is there for the next layer's gradient, still in the cache. Left to the end of
// backward, it goes back to the system, and every page of every gradient is a page fault in the next step.
// Nothing collective happens here: how far each rank comes is an accident.
void Reducer::finishEarly() {
  if (hook_ != nullptr || (tracksUse() && !used_known_)) {
    return;
  }
  while (finished_ < next_bucket_ && isReduced(finished_)) {
    finishBucket(finished_++, true);
  }
}

bool Reducer::isReduced(size_t index) {
  c10d::Work& work = *launched_[index].work;
  return buckets_[index].onCpu() && work.isCompleted() && work.isSuccess() && buckets_[index].settled();
}

void Reducer::finishBuckets(bool unpack) {
  const at::NoGradGuard no_grad;
  size_t& bucket = finished_;
  try {
    for (; bucket < buckets_.size(); ++bucket) {
      finishBucket(bucket, unpack);
    }
    awaitUsedMap(); // if nobody asked: every parameter was used here
    awaitPostBackward();
  } catch (const std::exception& error) {
    fail(
        bucket == buckets_.size() ? std::string("the end of backward was awaited")
                                  : "bucket " + std::to_string(bucket) + " of " + std::to_string(buckets_.size()) +
                " (" + namesInBucket(bucket) + ") was being reduced",
        error);
    throw;
  }
  if (static_graph_) {
    used_known_ = true;
  } else {
    used_.zero_();
  }
}

void Reducer::finishBucket(size_t index, bool unpack) {
  Bucket& bucket = buckets_[index];
  if (launched_[index].future) {
    const int64_t before = nowNs();
    const at::Tensor result = hookResult(*hook_, *launched_[index].future);
    stats_.exposed_ns += nowNs() - before;
    if (unpack) {
      bucket.takeHookResult(result);
    }
  } else {
    awaitAllReduce(index);
  }
  launched_[index] = {};
  std::vector<size_t> used;
  for (size_t slot = 0; unpack && slot < bucket.slots().size(); ++slot) {
    if (usedAnywhere(bucket.slots()[slot].index)) {
      used.push_back(slot);
    }
  }
  bucket.unpack(used);
  bucket.finishStep();
  if (record_ != nullptr) {
    record_->buckets[index].unpacked_ns = nowNs();
  }
}

void Reducer::awaitAllReduce(size_t index) {
  Bucket& bucket = buckets_[index];
  while (true) {
    wait(*launched_[index].work);
    switch (bucket.judge()) {
      case Bucket::Verdict::Good:
        return;
      case Bucket::Verdict::NonFinite:
        ++stats_.nonfinite_buckets;
        return;
      case Bucket::Verdict::RepackedAfterOverflow:
        ++stats_.overflowed_buckets;
        break;
      case Bucket::Verdict::RepackedAfterUnderflow:
        ++stats_.underflowed_buckets;
        break;
    }
    // Every rank came to the same verdict and finishes its buckets in the same order, so these match as well.
    stats_.wire_nbytes += static_cast<int64_t>(bucket.wireNbytes());
    const CallTag about(tags_[index]);
    launched_[index].work = allReduce(bucket);
  }
}

void Reducer::wait(c10d::Work& work) {
  const int64_t before = nowNs();
  work.wait();
  stats_.exposed_ns += nowNs() - before;
}

void Reducer::awaitUsedMap() {
  if (used_work_ != nullptr) {
    wait(*used_work_);
    used_work_.reset();
    used_anywhere_ = used_anywhere_.cpu();
  }
}

void Reducer::awaitPostBackward() {
  for (const auto& future : std::exchange(post_backward_, {})) {
    future->waitAndThrow();
  }
}

bool Reducer::usedAnywhere(size_t index) {
  if (!tracksUse() || used_.const_data_ptr<int32_t>()[index] != 0) {
    return true;
  }
  awaitUsedMap();
  return used_anywhere_.const_data_ptr<int32_t>()[index] != 0;
}

void Reducer::shadowBackward() {
  raising([&] {
    const std::lock_guard lock(mutex_);
    throwIfUnfinished();
    resetStep();
    record_.reset();
    if (++stats_.accumulated < options_.accumulate) {
      return;
    }
    stats_.accumulated = 0;
    try {
      for (Bucket& bucket : buckets_) {
        bucket.beginShadowStep();
      }
      if (!used_known_) {
        used_.zero_();
      }
      launchComplete();
    } catch (const std::exception& error) {
      fail("a rank without data took part in a reduction", error);
      throw;
    }
    finishBuckets(false);
    reduced_once_ = true;
    resetStep();
  });
}

} // namespace pycomm
