#include "ddp/bucket_pipeline.h"

#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/all.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <utility>

#include "base/deadline.h"
#include "base/error.h"
#include "base/step_place.h"
#include "c10d/call_tag.h"
#include "c10d/future_wait.h"
#include "c10d/work.h"
#include "ddp/pass_failure.h"
#include "numeric/convert.h"

namespace pycomm {
namespace {

/// One bucket as torch's comm hooks expect it: the flat gradients, not averaged, and where each parameter's lies. Borrows sizes from
/// the bucket's parameters.
c10d::GradBucket gradBucketOf(const Bucket& bucket, size_t index, size_t bucket_count) {
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> params;
  for (const Slot& slot : bucket.slots()) {
    offsets.push_back(slot.offset);
    lengths.push_back(slot.numel);
    sizes.push_back(slot.param.sizes());
    params.push_back(slot.param);
  }
  return c10d::GradBucket(
      index,
      bucket_count,
      bucket.memory().home,
      std::move(offsets),
      std::move(lengths),
      std::move(sizes),
      std::move(params),
      /*sparse_grad_indices=*/std::nullopt);
}

} // namespace

BucketPipeline::BucketPipeline(
    BucketSet& buckets,
    const ReducerGroup& group,
    const CommHook& hook,
    ReducerStats& stats,
    StepRecorder& recorder,
    bool looks)
    : buckets_(buckets),
      group_(group),
      hook_(hook),
      stats_(stats),
      recorder_(recorder),
      launched_(buckets.all().size()),
      looks_(looks && buckets.keepsResiduals()) {
  for (const Bucket& bucket : buckets.all()) {
    slot_count_ += bucket.slots().size();
  }
}

void BucketPipeline::begin(int divisor) {
  for (Bucket& bucket : buckets_.all()) {
    bucket.beginStep(divisor);
  }
  beginStep();
}

void BucketPipeline::beginShadow(int divisor) {
  for (Bucket& bucket : buckets_.all()) {
    bucket.beginShadowStep(divisor);
  }
  beginStep();
}

void BucketPipeline::beginStep() {
  ahead_ = 0;
  first_unlaunched_ = 0;
  first_unfinished_ = 0;
  finite_ = true;
  finite_on_device_.clear();
}

void BucketPipeline::packAhead(size_t param, bool unused, bool counts) {
  const BucketSet::Place place = buckets_.placeOf(param);
  recorder_.gradient(place.bucket);
  buckets_.all()[place.bucket].packAhead(place.slot, unused, counts);
  ++ahead_;
}

void BucketPipeline::setRatio(double ratio) {
  for (Bucket& bucket : buckets_.all()) {
    bucket.setRatio(ratio);
  }
  ahead_ = 0;
}

void BucketPipeline::pack(size_t param, bool unused) {
  const BucketSet::Place place = buckets_.placeOf(param);
  recorder_.gradient(place.bucket);
  buckets_.all()[place.bucket].pack(place.slot, unused);
}

bool BucketPipeline::launchFull() {
  const size_t launched_before = first_unlaunched_;
  while (!allLaunched() && buckets_.all()[first_unlaunched_].pending() == 0) {
    const size_t index = first_unlaunched_++;
    Bucket& bucket = buckets_.all()[index];
    bucket.seal();
    ++stats_.buckets_reduced;
    launch(index);
    if (recorder_.recording()) {
      const auto reduced =
          hook_.run != nullptr ? launched_[index].hook_result : launched_[index].all_reduce->getFuture();
      recorder_.launched(index, bucket.memory().gradientNbytes(), bucket.wireNbytes(), *reduced);
    }
  }
  return allLaunched() && first_unlaunched_ > launched_before;
}

void BucketPipeline::launch(size_t index) {
  Bucket& bucket = buckets_.all()[index];
  stats_.wire_nbytes += static_cast<int64_t>(bucket.wireNbytes());
  const CallTag about(bucket.tagWith(checksum_)); // comm_hooks.ordered hands it on to the hook's thread
  if (hook_.run != nullptr) {
    c10d::GradBucket grad_bucket = gradBucketOf(bucket, index, launched_.size());
    launched_[index].hook_result = hook_.run->runHook(grad_bucket);
  } else {
    launched_[index].all_reduce = bucket.allReduce(group_);
  }
}

bool BucketPipeline::allLaunched() const noexcept {
  return first_unlaunched_ == buckets_.all().size();
}

void BucketPipeline::finishEnded(const IsUsed& is_used) {
  while (first_unfinished_ < first_unlaunched_ && firstHasEnded()) {
    finishFirst(is_used);
  }
}

/// Whether finishFirst() would neither wait, throw nor reduce again. Another rank may see another answer at the same time.
bool BucketPipeline::firstHasEnded() const {
  // Gradients gain by an early average if they travel cast, and a hook's are in home. On a device nothing is asked: there a Work's answer costs
  // a query of an event, which may have to wait for the device.
  const Bucket& bucket = buckets_.all()[first_unfinished_];
  const auto& work = launched_[first_unfinished_].all_reduce; // null if its average could not be written
  if (work == nullptr || !bucket.memory().device().is_cpu()) {
    return false;
  }
  const auto* const ours = dynamic_cast<const PycommWork*>(work.get());
  return (ours != nullptr ? ours->hasEnded() : work->isCompleted()) && work->isSuccess() && bucket.canWrite();
}

void BucketPipeline::finishAll(const IsUsed& is_used) {
  while (first_unfinished_ < buckets_.all().size()) {
    finishFirst(is_used);
  }
}

void BucketPipeline::awaitAll() {
  for (; first_unfinished_ < buckets_.all().size(); ++first_unfinished_) {
    awaitFirst();
  }
}

void BucketPipeline::writeAll(const IsUsed& is_used) {
  for (size_t index = 0; index < buckets_.all().size(); ++index) {
    passStepPlace(StepPlace::Deliver);
    write(index, is_used);
  }
}

std::string BucketPipeline::awaited() const {
  if (first_unfinished_ >= buckets_.all().size()) { // more: cutting the buckets anew has failed, and these are fewer
    return "the end of backward was awaited";
  }
  return titleOf(first_unfinished_) + " was being reduced";
}

std::string BucketPipeline::titleOf(size_t index) const {
  const std::vector<std::vector<std::string>> names = buckets_.names();
  return "bucket " + std::to_string(index) + " of " + std::to_string(names.size()) + " (" + listed(names[index]) + ")";
}

// The hook's collectives have timeouts of their own, whose errors say more: this is for a future that never completes.
void BucketPipeline::awaitHook(c10::ivalue::Future& result) const {
  c10d::ProcessGroup& group = hook_.group == nullptr ? *group_.get() : *hook_.group;
  const auto timeout = ReducerGroup::timeoutOf(group, group_.paramDevice());
  const int64_t limit_ms = timeout ? 2 * timeout->count() : 0;
  if (awaitCompletion(result, timeout ? Deadline::after(limit_ms) : Deadline::never())) {
    return;
  }
  ErrorRecord record;
  record.code = ErrorCode::Timeout;
  record.rank = group_.jobRank();
  record.elapsed_ms = limit_ms;
  record.phase = ErrorPhase::Wait;
  record.summary = "Rank " + std::to_string(record.rank) + " has waited for " + std::to_string(limit_ms) +
      " ms, twice its group's timeout: the future that comm hook '" + hook_.name + "' has returned for " +
      titleOf(first_unfinished_) + " is not complete.";
  record.hint = "complete the future on every way through the hook, also after an error, or raise the group's timeout";
  throw Error(record);
}

/// Waits until the bucket holds the sums, or the hook's result. Throws the error of either.
void BucketPipeline::await(size_t index) {
  Bucket& bucket = buckets_.all()[index];
  if (hook_.run != nullptr) {
    const auto future = std::exchange(launched_[index].hook_result, nullptr);
    const int64_t before = nowNs();
    awaitHook(*future);
    future->waitAndThrow(); // for its error, and its streams
    const at::Tensor result = hook_.run->parseHookResult(future->value());
    stats_.exposed_ns += nowNs() - before;
    bucket.takeResult(result);
    return;
  }
  while (true) {
    const int64_t before = nowNs();
    launched_[index].all_reduce->wait();
    stats_.exposed_ns += nowNs() - before;
    switch (bucket.judge()) {
      case Verdict::Good:
        launched_[index].all_reduce.reset();
        return;
      case Verdict::NonFinite:
        ++stats_.nonfinite_buckets;
        launched_[index].all_reduce.reset();
        return;
      case Verdict::Overflowed:
        ++stats_.overflowed_buckets;
        break;
      case Verdict::Underflowed:
        ++stats_.underflowed_buckets;
        break;
    }
    // Every rank came to the same verdict and finishes its buckets in the same order, so these match as well.
    launch(index);
  }
}

void BucketPipeline::finishFirst(const IsUsed& is_used) {
  awaitFirst();
  write(first_unfinished_, is_used);
  ++first_unfinished_;
}

void BucketPipeline::awaitFirst() {
  await(first_unfinished_);
  if (looks_) {
    lookAt(buckets_.all()[first_unfinished_].sums());
  }
}

void BucketPipeline::write(size_t index, const IsUsed& is_used) {
  Bucket& bucket = buckets_.all()[index];
  std::vector<size_t> used;
  std::vector<size_t> unused;
  for (size_t slot = 0; slot < bucket.slots().size(); ++slot) {
    (is_used(bucket.slots()[slot].index) ? used : unused).push_back(slot);
  }
  settleResidual(bucket, unused);
  bucket.write(used);
  recorder_.unpacked(index);
}

/// The sums count: what the bucket's all-reduce has kept becomes what the next step reads.
void BucketPipeline::settleResidual(Bucket& bucket, const std::vector<size_t>& unused) {
  bucket.takeResidual();
  bucket.takeBack(unused, group_.rank() == 0); // as it is now: rank 0 of the sums may be gone
}

void BucketPipeline::lookAt(const at::Tensor& sums) {
  const at::NoGradGuard no_grad;
  if (!sums.defined()) { // of sparse gradients that no rank had
    return;
  }
  if (!sums.is_cpu()) {
    finite_on_device_.push_back(at::isfinite(sums).all());
  } else if (sums.scalar_type() == at::kFloat && sums.is_contiguous()) {
    const auto* values = static_cast<const float*>(sums.const_data_ptr());
    finite_ = finite_ && !magnitudeOf(values, static_cast<size_t>(sums.numel())).non_finite;
  } else {
    finite_ = finite_ && at::isfinite(sums).all().item<bool>();
  }
}

void BucketPipeline::lookAtAll() {
  if (!looks_) { // else it has
    for (const Bucket& bucket : buckets_.all()) {
      lookAt(bucket.sums());
    }
  }
}

bool BucketPipeline::averagesAreFinite() const {
  return finite_ && std::all_of(finite_on_device_.begin(), finite_on_device_.end(), [](const at::Tensor& finite) {
           return finite.item<bool>();
         });
}

} // namespace pycomm
