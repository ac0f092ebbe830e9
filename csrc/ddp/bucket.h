#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "ddp/bucket_memory.h"
#include "ddp/packer.h"
#include "ddp/wire.h"

namespace pycomm {

/// Gradients of one dtype that are reduced together, and one step of them. BucketMemory has the tensors. Packer fills and empties them.
/// Wire decides how they travel. BucketPipeline reduces a full bucket.
///
///     pack() each slot -> seal() -> allReduce() -> [judge() -> allReduce() again] -> takeResidual() -> takeBack(), write() -> commit()
///
/// Slots may be packed before the ratio is known: packAhead() -> setRatio().
///
/// Not thread-safe; the reducer's turn (PassLock) guards it.
class Bucket {
 public:
  /// `exponent`: see makeWire(). `tag`: see CallTag. The others: see BucketMemory.
  Bucket(
      const WireContext& context,
      const std::vector<ReducedParam>& params,
      const std::vector<size_t>& indices,
      int exponent,
      uint32_t tag,
      FlatMemory& source);

  [[nodiscard]] const BucketMemory& memory() const noexcept {
    return memory_;
  }
  [[nodiscard]] const std::vector<Slot>& slots() const noexcept {
    return memory_.slots;
  }
  /// See Wire::residual().
  [[nodiscard]] at::Tensor residual() const {
    return wire_->residual();
  }
  /// The bytes of one all-reduce, as they travel.
  [[nodiscard]] size_t wireNbytes() const;

  void beginStep(int divisor);
  /// A step in which this rank has no data: it packs zeros, to which a codec adds the residual, and no .grad is read or written.
  void beginShadowStep(int divisor);
  /// Slots that have not been packed in this step, or only ahead.
  [[nodiscard]] size_t pending() const noexcept {
    return pending_;
  }
  /// Packs the gradient of one slot; a parameter without one counts as zero. `unused`: no gradient has come here since the last reduction,
  /// so there may be an old .grad, which stays if no rank has used the parameter.
  void pack(size_t slot, bool unused);
  /// The same before setRatio(). `counts`: the ratio will not be 0.
  void packAhead(size_t slot, bool unused, bool counts);
  /// The ratio of this step, 1 until then: see PassWeights. 0: zeros are packed, whatever gradients there are.
  void setRatio(double ratio);
  /// After the last pack().
  void seal();
  /// The tag of its collectives: of the bucket's names, and of `checksum`, that of what all ranks must share. A rank with another one gets a
  /// mismatch, if the group compares operations.
  [[nodiscard]] uint32_t tagWith(uint32_t checksum) const;
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> allReduce(const ReducerGroup& group);
  /// Judges the sums. If they have to be reduced again, this packs and seals the gradients for it.
  [[nodiscard]] Verdict judge();
  /// After judge() or takeResult(): the elements that were reduced. Of sparse gradients that are written, those of .grad; undefined: there are none.
  [[nodiscard]] at::Tensor sums() const;
  /// Of a bucket on the CPU: whether write() can follow now, as judge() would accept the sums.
  [[nodiscard]] bool canWrite() const;
  /// The result of a comm hook becomes the content of home.
  void takeResult(const at::Tensor& result);
  /// Writes the averages of these slots to .grad; nothing in a shadow step.
  void write(const std::vector<size_t>& slots);
  /// `slots`: those that no rank has used, in a shadow step as well. Their .grad is what it was, and what the codec has delivered for them
  /// goes back into error feedback: each rank takes what it packed out of its residual, and one of them `adds_sum`, whatever ranks have data.
  void takeBack(const std::vector<size_t>& slots, bool adds_sum);
  /// See Wire::takeResidual(). Before takeBack() and write().
  void takeResidual() noexcept {
    wire_->takeResidual();
  }
  /// The step is over on all buckets: see Wire::commit().
  std::optional<int> commit() noexcept {
    return wire_->commit();
  }

 private:
  [[nodiscard]] double packFactor() const {
    return wire_->packFactor(divisor_) * ratio_;
  }
  [[nodiscard]] bool packsZeros() const noexcept {
    return shadow_ || ratio_ == 0.0;
  }
  void keepOld(size_t slot, bool unused);
  void noteStream();
  [[nodiscard]] bool joinStreams();

  std::unique_ptr<Wire> wire_;
  BucketMemory memory_;
  std::unique_ptr<Packer> packer_;
  std::vector<c10::Stream> streams_; ///< of a device: on which autograd has made gradients since the last seal()
  bool streams_differed_ = false; ///< setRatio() has joined some
  size_t pending_ = 0;
  struct Ahead {
    size_t slot;
    double factor; ///< packed with; 0: not packed
  };
  std::vector<Ahead> ahead_;
  std::map<size_t, at::Tensor> old_grads_; ///< of this step's unused slots, copied before they were packed; by slot
  int rank_;
  uint32_t tag_;
  int divisor_ = 1;
  double ratio_ = 1.0;
  bool shadow_ = false;
};

} // namespace pycomm
