#include "ddp/bucket_pipeline.h"

#include <utility>
#include <vector>

#include "ddp/pass_failure.h"

namespace pycomm {

BucketPipeline::BucketPipeline(BucketSet& buckets, std::unique_ptr<Reduction> reduction, StepRecorder& recorder)
    : buckets_(buckets), reduction_(std::move(reduction)), recorder_(recorder) {}

void BucketPipeline::begin(int divisor) {
  for (Bucket& bucket : buckets_.all()) {
    bucket.beginStep(divisor);
  }
  first_unlaunched_ = 0;
  first_unfinished_ = 0;
}

void BucketPipeline::beginShadow(int divisor) {
  for (Bucket& bucket : buckets_.all()) {
    bucket.beginShadowStep(divisor);
  }
  first_unlaunched_ = 0;
  first_unfinished_ = 0;
}

void BucketPipeline::pack(size_t param) {
  const BucketSet::Place place = buckets_.placeOf(param);
  recorder_.gradient(place.bucket);
  buckets_.all()[place.bucket].pack(place.slot);
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

void BucketPipeline::finishEnded(const IsWritten& is_written) {
  while (first_unfinished_ < first_unlaunched_ &&
         reduction_->ended(buckets_.all()[first_unfinished_], first_unfinished_)) {
    finishFirst(is_written);
  }
}

void BucketPipeline::finishAll(const IsWritten& is_written) {
  while (first_unfinished_ < buckets_.all().size()) {
    finishFirst(is_written);
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

void BucketPipeline::finishFirst(const IsWritten& is_written) {
  const size_t index = first_unfinished_;
  Bucket& bucket = buckets_.all()[index];
  reduction_->finish(bucket, index);
  std::vector<size_t> written;
  for (size_t slot = 0; slot < bucket.slots().size(); ++slot) {
    if (is_written(bucket.slots()[slot].index)) {
      written.push_back(slot);
    }
  }
  bucket.commit(written);
  recorder_.unpacked(index);
  ++first_unfinished_;
}

} // namespace pycomm
