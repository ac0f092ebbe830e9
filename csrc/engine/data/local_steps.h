#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "base/buffer_view.h"
#include "engine/loop/staging_pool.h"
#include "engine/operation/operation.h"
#include "engine/operation/prepared_schedule.h"

namespace pycomm {

/// The part of an operation's steps that concerns this rank alone: where their regions lie in memory, and what is copied, added up, encoded
/// and decoded there. Transfer decides when a step runs.
/// Thread: the data loop's.
class LocalSteps {
 public:
  /// The operation outlives this. `size`: of its group. The pool gives scratch memory, and outlives this, too.
  LocalSteps(const Operation& operation, int size, StagingPool& staging);

  [[nodiscard]] std::byte* at(const Region& region) const;
  [[nodiscard]] BufferView view(const Region& region) const {
    return {at(region), prepared_.nbytesOf(region)};
  }

  /// Some of a step's values, which are copied, added up, encoded or decoded one by one: how a step is cut changes no bit.
  struct Slice {
    size_t begin = 0;
    size_t numel = 0;
  };
  /// How many values a step has. None if there is nothing to do here: it only sends, its frame went straight to its place (`arriving` is
  /// null), or it copies a value to its own place.
  [[nodiscard]] size_t valuesOf(const Step& step, const std::byte* arriving) const;
  /// The slice from `begin` on that reads and writes `nbytes` or a little less, but never too few values to be worth a call; and how many
  /// bytes that are.
  [[nodiscard]] std::pair<Slice, size_t> sliceOf(const Step& step, size_t values, size_t begin, size_t nbytes) const;
  /// Runs a slice of a step. `arriving`: its frame, which holds the result of a RecvReduceSend.
  void run(const Step& step, Slice slice, std::byte* arriving) const;
  /// Counts what a step sends encoded.
  void countSent(const Step& step) const;

 private:
  [[nodiscard]] bool isEncoded(const Region& region) const {
    return prepared_.schedule.codec != Codec::None && prepared_.dtypeOf(region.buffer) == DType::UInt8;
  }
  [[nodiscard]] Region cut(const Region& region, Slice slice) const;
  void copy(const Step& step, Slice slice) const;
  // These get a step that is cut already, and the slice for its sources.
  /// Adds up what has arrived and this rank's own part.
  void combine(const Step& step, void* dst, const void* arriving) const;
  void reduceSources(const Step& step, Slice slice) const;
  /// Encode, Decode and ReduceEncoded.
  void runCodec(const Step& step, Slice slice) const;

  const Operation& operation_;
  const PreparedSchedule& prepared_; ///< held by the operation's request
  const int size_;
  std::vector<StagingBuffer> scratch_;
};

} // namespace pycomm
