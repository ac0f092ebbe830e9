#include "ddp/steps.h"

#include <utility>

namespace pycomm {

void StepRecorder::begin(size_t bucket_count) {
  record_ = on_ ? std::make_shared<StepRecord>(bucket_count) : nullptr;
  if (record_ != nullptr) {
    record_->began_ns = nowNs();
  }
}

void StepRecorder::gradient(size_t bucket) {
  if (record_ == nullptr) {
    return;
  }
  StepRecord::Bucket& of = record_->buckets[bucket];
  const int64_t now = nowNs();
  record_->first_gradient_ns = record_->first_gradient_ns == 0 ? now : record_->first_gradient_ns;
  of.first_gradient_ns = of.first_gradient_ns == 0 ? now : of.first_gradient_ns;
}

void StepRecorder::launched(size_t bucket, size_t gradient_nbytes, size_t wire_nbytes, c10::ivalue::Future& reduced) {
  StepRecord::Bucket& of = record_->buckets[bucket];
  of.gradient_nbytes = static_cast<int64_t>(gradient_nbytes);
  of.wire_nbytes = static_cast<int64_t>(wire_nbytes);
  of.launched_ns = nowNs();
  reduced.addCallback([record = record_, bucket](c10::ivalue::Future& /*future*/) {
    record->buckets[bucket].reduced_ns.store(nowNs(), std::memory_order_release);
  });
}

void StepRecorder::unpacked(size_t bucket) {
  if (record_ != nullptr) {
    record_->buckets[bucket].unpacked_ns = nowNs();
  }
}

void StepRecorder::backwardEnded() {
  if (record_ != nullptr) {
    record_->backward_ended_ns = nowNs();
  }
}

void StepRecorder::end() {
  if (record_ != nullptr) {
    record_->ended_ns = nowNs();
    last_ = std::exchange(record_, nullptr);
  }
}

} // namespace pycomm
