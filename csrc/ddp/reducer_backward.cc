// One backward pass of a reducer: from the first gradient to the last average.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <utility>

#include "c10d/raising.h"
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
    if (used_.has_value()) {
      used_->mark(index); // also inside no_sync(): the reduction after it covers it
    }
  }
  if (pass_ == Pass::Armed) {
    beginPass();
  }
  if (static_graph_.has_value() && static_graph_->counting()) {
    static_graph_->count(index);
    order_.came(index);
    return; // delayAllReduce() goes on
  }
  if (pass_ != Pass::Reducing) {
    return;
  }
  if (static_graph_.has_value() && !static_graph_->isLast(index)) {
    return;
  }
  finishEarly();
  markReady(index);
  launchComplete();
  if (first_unlaunched_ == buckets_.all().size()) {
    queueFinish();
  }
}

void Reducer::beginPass() {
  ++stats_.passes;
  for (const Bucket& bucket : buckets_.all()) {
    stats_.gradient_nbytes += static_cast<int64_t>(bucket.memory().gradientNbytes());
  }
  if (++stats_.accumulated < options_.accumulate) {
    pass_ = Pass::Local;
    return;
  }
  stats_.accumulated =
      0; // here and not in commit(): if this pass fails, the next one counts from 1 and a saved state can be loaded
  pass_ = Pass::Reducing;
  takeDivisor();
  if (static_graph_.has_value()) {
    if (static_graph_->counting()) {
      return;
    }
    static_graph_->beginPass();
  }
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
  for (Bucket& bucket : buckets_.all()) {
    bucket.beginStep(divisor_);
  }
}

void Reducer::delayAllReduce() {
  raising([&] {
    const std::lock_guard lock(mutex_);
    if (!static_graph_.has_value() || !static_graph_->counting()) {
      return;
    }
    static_graph_->close();
    unreachable_.clear();
    for (size_t index = 0; index < params_.size(); ++index) {
      if (trainable_[index] && !static_graph_->reaches(index)) {
        unreachable_.push_back(index);
      }
    }
    if (pass_ != Pass::Reducing) {
      return; // accumulating, or inside no_sync()
    }
    try {
      for (const Bucket& bucket : buckets_.all()) {
        for (const Slot& slot : bucket.slots()) {
          markReady(slot.index);
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
      static_graph_.has_value()
          ? "The graph is not the one of the first pass: leave static_graph=True out."
          : "Either it is used again by a checkpointed part of the model (use torch.utils.checkpoint with "
            "use_reentrant=False, or static_graph=True), or forward's output did not lead to it and "
            "find_unused_parameters=True counted it as unused.");
  ready_[index] = true;
  if (order_.open() && !static_graph_.has_value()) {
    order_.came(index);
  }
  const BucketSet::Place place = buckets_.placeOf(index);
  recorder_.gradient(place.bucket);
  buckets_.all()[place.bucket].pack(place.slot);
}

void Reducer::launchComplete() {
  while (first_unlaunched_ < buckets_.all().size() && buckets_.all()[first_unlaunched_].pending() == 0) {
    const size_t index = first_unlaunched_++;
    Bucket& bucket = buckets_.all()[index];
    bucket.seal();
    reduction_->launch(bucket, index);
    if (recorder_.recording()) {
      recorder_.launched(index, bucket, *reduction_->future(index));
    }
    if (first_unlaunched_ == buckets_.all().size() && used_.has_value()) {
      used_->launch(*group_, ownDevice(*group_));
    }
  }
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
    if (pass_ != Pass::Reducing || first_unlaunched_ != buckets_.all().size()) {
      return; // of a static graph whose first pass was local
    }
    recorder_.backwardEnded();
    finishBuckets(true);
    recorder_.end();
    ++stats_.steps;
    commit();
  });
}

// Finishes the buckets that the network has done already. A gradient that travels cast stays in memory of its own until its average
// is in .grad: if it is freed now, the next layer's gradient gets that memory while it is still in the cache. If it is freed at the
// end of backward, it goes back to the system, and the next step has a page fault for every page of every gradient.
// Nothing collective happens here: how far each rank comes is an accident.
void Reducer::finishEarly() {
  if (used_.has_value() && !used_->kept()) {
    return;
  }
  while (first_unfinished_ < first_unlaunched_ &&
         reduction_->ended(buckets_.all()[first_unfinished_], first_unfinished_)) {
    finishBucket(first_unfinished_++, true);
  }
}

void Reducer::finishBuckets(bool unpack) {
  const at::NoGradGuard no_grad;
  size_t& bucket = first_unfinished_;
  try {
    for (; bucket < buckets_.all().size(); ++bucket) {
      finishBucket(bucket, unpack);
    }
    if (used_.has_value()) {
      used_->await(); // every rank takes part, also if all parameters were used here
    }
    for (const auto& future : std::exchange(post_backward_, {})) {
      future->waitAndThrow();
    }
  } catch (const std::exception& error) {
    fail(
        bucket == buckets_.all().size() ? std::string("the end of backward was awaited")
                                        : "bucket " + std::to_string(bucket) + " of " +
                std::to_string(buckets_.all().size()) + " (" + namesInBucket(bucket) + ") was being reduced",
        error);
    throw;
  }
}

void Reducer::finishBucket(size_t index, bool unpack) {
  Bucket& bucket = buckets_.all()[index];
  reduction_->finish(bucket, index);
  std::vector<size_t> used;
  for (size_t slot = 0; unpack && slot < bucket.slots().size(); ++slot) {
    if (!used_.has_value() || used_->anywhere(bucket.slots()[slot].index)) {
      used.push_back(slot);
    }
  }
  bucket.commit(used);
  recorder_.unpacked(index);
}

// The one place where a step changes what the next one reads, with two exceptions: Bucket::commit() has written averages and scales
// as each bucket ended, and all-reduces write the loss that error feedback keeps.
void Reducer::commit() {
  stats_.add(reduction_->counts());
  reduction_->clearCounts();
  if (used_.has_value()) {
    stats_.exposed_ns += used_->takeWaitedNs();
    if (static_graph_.has_value()) {
      used_->keep();
    } else {
      used_->clear();
    }
  }
  order_.close();
  resetStep();
}

void Reducer::shadowBackward() {
  raising([&] {
    const std::lock_guard lock(mutex_);
    throwIfUnfinished();
    resetStep();
    recorder_.drop();
    if (++stats_.accumulated < options_.accumulate) {
      return;
    }
    stats_.accumulated = 0; // see beginPass()
    try {
      for (Bucket& bucket : buckets_.all()) {
        bucket.beginShadowStep(divisor_);
      }
      if (used_.has_value()) {
        used_->clear();
      }
      launchComplete();
    } catch (const std::exception& error) {
      fail("a rank without data took part in a reduction", error);
      throw;
    }
    finishBuckets(false);
    commit();
  });
}

} // namespace pycomm
