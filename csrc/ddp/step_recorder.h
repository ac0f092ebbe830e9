#pragma once

#include <ATen/core/ivalue.h>

#include <memory>

#include "ddp/bucket.h"
#include "ddp/step_record.h"

namespace pycomm {

/// Writes a StepRecord of each step while it is switched on. The last one that has ended is kept.
class StepRecorder {
 public:
  void switchOn(bool on) noexcept {
    on_ = on;
  }
  [[nodiscard]] std::shared_ptr<const StepRecord> last() const {
    return last_;
  }

  void begin(size_t bucket_count);
  void gradient(size_t bucket);
  void launched(size_t index, const Bucket& bucket, c10::ivalue::Future& reduced);
  void unpacked(size_t bucket);
  void backwardEnded();
  void end();
  /// The step under way is not recorded.
  void drop() noexcept {
    record_.reset();
  }
  [[nodiscard]] bool recording() const noexcept {
    return record_ != nullptr;
  }

 private:
  bool on_ = false;
  std::shared_ptr<StepRecord>
      record_; ///< of the step under way; null unless it is recorded. Futures' callbacks hold it too
  std::shared_ptr<const StepRecord> last_;
};

} // namespace pycomm
