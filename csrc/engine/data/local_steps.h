#pragma once

#include <cstddef>
#include <vector>

#include "base/buffer_view.h"
#include "engine/loop/staging_pool.h"
#include "engine/operation/operation.h"
#include "engine/operation/prepared_schedule.h"

namespace pycomm {

/// The part of an operation's steps that concerns this rank alone: where their regions lie in memory, and what is copied, added up, encoded
/// and decoded there. Transfer decides when a step runs.
/// Thread: the lane's.
class LocalSteps {
 public:
  /// The operation outlives this. `size`: of its group. The pool gives scratch memory, and outlives this, too.
  LocalSteps(const Operation& operation, int size, StagingPool& staging);

  [[nodiscard]] std::byte* at(const Region& region) const;
  [[nodiscard]] BufferView view(const Region& region) const {
    return {at(region), prepared_.nbytesOf(region)};
  }

  /// Runs a step that neither receives nor sends.
  void run(const Step& step) const;
  /// Adds up what has arrived and this rank's own part, for a step that receives.
  void combine(const Step& step, void* dst, const void* arriving) const;
  /// Counts what a step sends encoded.
  void countSent(const Step& step) const;

 private:
  void reduceSources(const Step& step) const;
  /// Encode, Decode and ReduceEncoded.
  void runCodec(const Step& step) const;

  const Operation& operation_;
  const PreparedSchedule& prepared_; ///< held by the operation's request
  const int size_;
  std::vector<StagingBuffer> scratch_;
};

} // namespace pycomm
