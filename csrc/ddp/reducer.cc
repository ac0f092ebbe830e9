#include "ddp/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>

#include <chrono>
#include <utility>

#include "c10d/raising.h"
#include "ddp/comm_hook.h"

namespace pycomm {
namespace {

// The first line of an exception's text, without torch's C++ backtrace.
std::string firstLine(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

} // namespace

Reducer::Reducer(
    std::vector<at::Tensor> params,
    std::vector<std::string> names,
    std::vector<std::vector<size_t>> bucket_indices,
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    ReducerOptions options)
    : params_(std::move(params)),
      names_(std::move(names)),
      bucket_indices_(std::move(bucket_indices)),
      group_(std::move(group)),
      options_(options) {
  TORCH_CHECK_VALUE(names_.size() == params_.size(), "one name a parameter");
  buildBuckets();
  if (options_.native_hooks) {
    grad_hooks_.emplace(params_, [this](size_t index) { onGradient(index); });
  }
}

void Reducer::buildBuckets() {
  BucketLayout layout;
  layout.rank = group_->getRank();
  layout.world_size = group_->getSize();
  layout.wire_dtype = options_.wire_dtype;
  layout.grads_are_views = options_.gradient_as_bucket_view;
  layout.hook_averages = hook_ != nullptr;
  buckets_.clear();
  places_.assign(params_.size(), Place{bucket_indices_.size(), 0});
  for (size_t b = 0; b < bucket_indices_.size(); ++b) {
    buckets_.emplace_back(params_, bucket_indices_[b], layout);
    for (size_t slot = 0; slot < bucket_indices_[b].size(); ++slot) {
      places_.at(bucket_indices_[b][slot]) = {b, slot};
    }
  }
  for (size_t index = 0; index < places_.size(); ++index) {
    TORCH_CHECK_VALUE(places_[index].bucket < buckets_.size(), "parameter '", names_[index], "' is in no bucket");
  }
  launched_.assign(buckets_.size(), {});
  used_ = at::zeros({static_cast<int64_t>(params_.size())}, at::kInt);
  resetStep();
}

void Reducer::resetStep() {
  for (Bucket& bucket : buckets_) {
    bucket.beginStep();
  }
  ready_.assign(params_.size(), false);
  next_bucket_ = 0;
  expecting_ = false;
  started_ = false;
}

void Reducer::prepareForForward() {
  const std::lock_guard lock(mutex_);
  throwIfUnfinished();
}

void Reducer::prepareForBackward(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex_);
  throwIfUnfinished();
  resetStep();
  unreachable_.clear();
  if (options_.find_unused_parameters && grad_hooks_.has_value()) {
    unreachable_ = grad_hooks_->unreachableFrom(outputs);
  }
  expecting_ = true;
}

void Reducer::onGradient(size_t index) {
  raising([&] {
    const std::lock_guard lock(mutex_);
    try {
      takeGradient(index);
    } catch (const std::exception& error) {
      fail("the gradient of parameter '" + names_[index] + "' was being reduced", error);
      throw;
    }
  });
}

void Reducer::takeGradient(size_t index) {
  const at::Tensor& grad = params_[index].grad();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !grad.defined() || grad.layout() == at::kStrided,
      "parameter '",
      names_[index],
      "' got a sparse gradient; pycomm.DistributedDataParallel reduces dense ones only");
  if (options_.find_unused_parameters && grad.defined()) {
    used_.mutable_data_ptr<int32_t>()[index] = 1; // also inside no_sync(): the reduction after it covers it
  }
  if (!expecting_) {
    return;
  }
  if (!std::exchange(started_, true)) {
    for (const size_t unreachable : unreachable_) {
      markReady(unreachable);
    }
  }
  markReady(index);
}

void Reducer::markReady(size_t index) {
  TORCH_CHECK(
      !ready_[index],
      "parameter '",
      names_[index],
      "' got a second gradient in one backward pass. Either it is used again by a ",
      "checkpointed part of the model (use torch.utils.checkpoint with use_reentrant=False), or forward's output did ",
      "not lead to it and find_unused_parameters=True counted it as unused.");
  ready_[index] = true;
  const Place place = places_[index];
  buckets_[place.bucket].pack(place.slot);
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending() == 0) {
    launch(next_bucket_++);
    if (next_bucket_ == buckets_.size()) {
      launchUsedMap();
      queueFinish();
    }
  }
}

void Reducer::launch(size_t index) {
  Bucket& bucket = buckets_[index];
  bucket.seal();
  at::Tensor wire = bucket.wire();
  stats_.wire_nbytes += static_cast<int64_t>(wire.nbytes());
  ++stats_.buckets_reduced;
  if (hook_ != nullptr) {
    c10d::GradBucket grad_bucket = gradBucketOf(bucket, index, buckets_.size());
    launched_[index].future = hook_->runHook(grad_bucket);
    return;
  }
  std::vector<at::Tensor> tensors{std::move(wire)};
  launched_[index].work = group_->allreduce(tensors);
}

void Reducer::launchUsedMap() {
  if (!options_.find_unused_parameters) {
    return;
  }
  used_anywhere_ = used_.clone();
  std::vector<at::Tensor> tensors{used_anywhere_};
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
    const at::NoGradGuard no_grad;
    size_t bucket = 0;
    try {
      for (; bucket < buckets_.size(); ++bucket) {
        finishBucket(bucket);
      }
      awaitUsedMap(); // if nobody asked: every parameter was used here
    } catch (const std::exception& error) {
      fail("bucket " + std::to_string(bucket) + " of " + std::to_string(buckets_.size()) + " was being reduced", error);
      throw;
    }
    used_.zero_();
    ++stats_.steps;
    resetStep();
  });
}

void Reducer::finishBucket(size_t index) {
  Bucket& bucket = buckets_[index];
  if (launched_[index].future) {
    const auto before = std::chrono::steady_clock::now();
    const at::Tensor result = hookResult(*hook_, *launched_[index].future);
    stats_.exposed_ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - before).count();
    bucket.takeHookResult(result);
  } else {
    awaitAllReduce(index);
  }
  launched_[index] = {};
  for (size_t slot = 0; slot < bucket.slots().size(); ++slot) {
    if (usedAnywhere(bucket.slots()[slot].index)) {
      bucket.unpack(slot);
    }
  }
  bucket.finishStep();
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
    std::vector<at::Tensor> tensors{bucket.wire()};
    stats_.wire_nbytes += static_cast<int64_t>(tensors[0].nbytes());
    launched_[index].work = group_->allreduce(tensors);
  }
}

void Reducer::wait(c10d::Work& work) {
  const auto before = std::chrono::steady_clock::now();
  work.wait();
  stats_.exposed_ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - before).count();
}

void Reducer::awaitUsedMap() {
  if (used_work_ != nullptr) {
    wait(*used_work_);
    used_work_.reset();
  }
}

bool Reducer::usedAnywhere(size_t index) {
  if (!options_.find_unused_parameters || used_.const_data_ptr<int32_t>()[index] != 0) {
    return true;
  }
  awaitUsedMap();
  return used_anywhere_.const_data_ptr<int32_t>()[index] != 0;
}

void Reducer::fail(const std::string& doing, const std::exception& error) {
  if (failure_.empty()) {
    failure_ = "while " + doing + ": " + firstLine(error);
  }
}

void Reducer::throwIfUnfinished() const {
  const int rank = group_->getRank();
  TORCH_CHECK(
      failure_.empty(),
      "rank ",
      rank,
      ": an earlier backward pass failed ",
      failure_,
      " -- gradients and perhaps parameters differ ",
      "between ranks since then. Start again from a checkpoint with a new process group.");
  TORCH_CHECK(
      !started_,
      "rank ",
      rank,
      ": the last backward pass gave no gradient to ",
      namesOfMissing(),
      ", so buckets were not ",
      "reduced and the other ranks may still be waiting for them. Pass find_unused_parameters=True if these ",
      "parameters take no part in every loss; freeze them if they never do; and let every output of forward() enter ",
      "the loss.");
}

std::string Reducer::namesOfMissing() const {
  constexpr size_t kShown = 10;
  std::string text;
  size_t missing = 0;
  for (size_t index = 0; index < ready_.size(); ++index) {
    if (!ready_[index] && ++missing <= kShown) {
      text += (missing == 1 ? "'" : ", '") + names_[index] + "'";
    }
  }
  return missing <= kShown ? text : text + " and " + std::to_string(missing - kShown) + " more parameters";
}

void Reducer::checkHookMayBeSet() const {
  TORCH_CHECK(hook_ == nullptr, "a comm hook has been registered already; there can be one");
  TORCH_CHECK(
      !options_.wire_dtype.has_value(),
      "a comm hook cannot be combined with wire_dtype: the hook decides what travels. Leave one of them out.");
  TORCH_CHECK(!started_ && stats_.steps == 0, "a comm hook must be registered before the first backward pass");
}

void Reducer::registerCommHook(std::unique_ptr<c10d::CommHookInterface> hook) {
  const std::lock_guard lock(mutex_);
  checkHookMayBeSet();
  hook_ = std::move(hook);
  buildBuckets();
}

void Reducer::compressToFp16() {
  const std::lock_guard lock(mutex_);
  checkHookMayBeSet();
  options_.wire_dtype = at::kHalf;
  buildBuckets();
}

void Reducer::removeAutogradHooks() {
  const std::lock_guard lock(mutex_);
  if (grad_hooks_.has_value()) {
    grad_hooks_->remove();
  }
}

void Reducer::checkFinalized() {
  const std::lock_guard lock(mutex_);
  throwIfUnfinished();
}

void Reducer::resetState() {
  const std::lock_guard lock(mutex_);
  failure_.clear();
  used_work_.reset();
  buildBuckets();
}

void Reducer::updateProcessGroup(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!started_, "the process group cannot change in the middle of a backward pass");
  group_ = std::move(group);
  buildBuckets();
}

ReducerStats Reducer::stats() {
  const std::lock_guard lock(mutex_);
  return stats_;
}

} // namespace pycomm
