#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/bucket_memory.h"
#include "ddp/grad_streams.h"
#include "ddp/packer.h"
#include "ddp/wire.h"

namespace pycomm {

struct BucketOptions {
  WireOptions wire;
  bool grads_are_views = false; ///< .grad points into the bucket
  std::string cuda_library; ///< see makePacker()
};

/// Gradients of one dtype that are reduced together, and one step of them. BucketMemory has the tensors, Packer fills and empties
/// them, Wire says how they travel; what happens to a full bucket is a Reduction.
///
///     pack() each slot -> seal() -> [reduced -> judge() -> reduced again] -> commit()
///
/// Not thread-safe; the reducer's mutex guards it.
class Bucket {
 public:
  /// As of BucketMemory.
  Bucket(
      const std::vector<at::Tensor>& params,
      const std::vector<size_t>& indices,
      const BucketOptions& options,
      FlatMemory& source);

  [[nodiscard]] const BucketMemory& memory() const noexcept {
    return memory_;
  }
  [[nodiscard]] const std::vector<Slot>& slots() const noexcept {
    return memory_.slots;
  }
  [[nodiscard]] const Wire& wire() const noexcept {
    return *wire_;
  }
  /// The part of wire().lost() that is one slot's, in its parameter's shape.
  [[nodiscard]] at::Tensor lostOf(const Slot& slot) const;
  /// Bytes that one all-reduce is handed, as they travel.
  [[nodiscard]] size_t wireNbytes() const;

  void beginStep(int divisor);
  /// A step in which this rank has no data: zeros travel, and no .grad is read or written.
  void beginShadowStep(int divisor);
  /// Slots that have not been packed in this step.
  [[nodiscard]] size_t pending() const noexcept {
    return pending_;
  }
  /// Takes the gradient of one slot in; a parameter without one counts as zero.
  void pack(size_t slot);
  /// After the last pack().
  void seal();
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> allReduce(c10d::ProcessGroup& group) const;
  /// What the sums are. If they are to be reduced again, the gradients are packed and sealed for that.
  [[nodiscard]] Verdict judge();
  /// Whether the sums can be averages now: on the CPU, and judge() would take them as they are.
  [[nodiscard]] bool settled() const;
  /// What a comm hook returned becomes the content of home.
  void takeResult(const at::Tensor& result);
  /// The one place where a step changes what the next one reads of this bucket: writes the averages of these slots to .grad, and takes
  /// the scale of the next step.
  void commit(const std::vector<size_t>& slots);

 private:
  std::unique_ptr<Wire> wire_;
  BucketMemory memory_;
  std::unique_ptr<Packer> packer_;
  std::optional<GradStreams> streams_; ///< of a CUDA device
  size_t pending_ = 0;
  int divisor_ = 1;
  bool shadow_ = false;
};

} // namespace pycomm
