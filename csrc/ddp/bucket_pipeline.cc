#include "ddp/bucket_pipeline.h"

#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/all.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ddp/pass_failure.h"
#include "numeric/convert.h"

namespace pycomm {

BucketPipeline::BucketPipeline(
    BucketSet& buckets,
    std::unique_ptr<Reduction> reduction,
    StepRecorder& recorder,
    bool looks)
    : buckets_(buckets),
      reduction_(std::move(reduction)),
      recorder_(recorder),
      looks_(looks && buckets.keepsResiduals()) {}

void BucketPipeline::begin(int divisor, double ratio) {
  for (Bucket& bucket : buckets_.all()) {
    bucket.beginStep(divisor, ratio);
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
  first_unlaunched_ = 0;
  first_unfinished_ = 0;
  finite_ = true;
  finite_on_device_.clear();
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
    reduction_->launch(bucket, index);
    if (recorder_.recording()) {
      recorder_.launched(index, bucket, *reduction_->future(index));
    }
  }
  return allLaunched() && first_unlaunched_ > launched_before;
}

bool BucketPipeline::allLaunched() const noexcept {
  return first_unlaunched_ == buckets_.all().size();
}

void BucketPipeline::finishEnded(const IsUsed& is_used) {
  while (first_unfinished_ < first_unlaunched_ &&
         reduction_->ended(buckets_.all()[first_unfinished_], first_unfinished_)) {
    finishFirst(is_used);
  }
}

void BucketPipeline::finishAll(const IsUsed& is_used) {
  while (first_unfinished_ < buckets_.all().size()) {
    finishFirst(is_used);
  }
}

std::string BucketPipeline::awaited() const {
  const std::vector<std::vector<std::string>> names = buckets_.names();
  if (first_unfinished_ == names.size()) {
    return "the end of backward was awaited";
  }
  return "bucket " + std::to_string(first_unfinished_) + " of " + std::to_string(names.size()) + " (" +
      listed(names[first_unfinished_]) + ") was being reduced";
}

void BucketPipeline::finishFirst(const IsUsed& is_used) {
  const size_t index = first_unfinished_;
  Bucket& bucket = buckets_.all()[index];
  reduction_->finish(bucket, index);
  if (looks_) {
    lookAt(bucket.sums());
  }
  std::vector<size_t> used;
  std::vector<size_t> unused;
  for (size_t slot = 0; slot < bucket.slots().size(); ++slot) {
    (is_used(bucket.slots()[slot].index) ? used : unused).push_back(slot);
  }
  bucket.takeBack(unused);
  bucket.write(used);
  recorder_.unpacked(index);
  ++first_unfinished_;
}

void BucketPipeline::lookAt(const at::Tensor& sums) {
  const at::NoGradGuard no_grad;
  if (!sums.is_cpu()) {
    finite_on_device_.push_back(at::isfinite(sums).all());
  } else if (sums.scalar_type() == at::kFloat && sums.is_contiguous()) {
    const auto* values = static_cast<const float*>(sums.const_data_ptr());
    finite_ = finite_ && !magnitudeOf(values, static_cast<size_t>(sums.numel())).non_finite;
  } else {
    finite_ = finite_ && at::isfinite(sums).all().item<bool>();
  }
}

bool BucketPipeline::averagesAreFinite() const {
  return finite_ && std::all_of(finite_on_device_.begin(), finite_on_device_.end(), [](const at::Tensor& finite) {
           return finite.item<bool>();
         });
}

} // namespace pycomm
