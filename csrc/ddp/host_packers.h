#pragma once

#include "ddp/packer.h"
#include "numeric/convert.h"

namespace pycomm {

// The packers that take each gradient when it comes.

/// Gradients in their own dtype. If .grad is a view of home already, it is scaled in place. If gradients are to be views and it is
/// none, it becomes one.
class HomePacker final : public Packer {
 public:
  void pack(BucketMemory& memory, const Slot& slot, double factor) override;
  void unpack(BucketMemory& memory, const std::vector<size_t>& slots, double factor) const override;
};

/// Gradients on the CPU, cast on their way. .grad keeps its own memory until it gets the average: a bucket can be packed again.
class CastPacker final : public Packer {
 public:
  explicit CastPacker(bool measures) : measures_(measures) {}

  void begin() override {
    magnitude_ = {};
  }
  void pack(BucketMemory& memory, const Slot& slot, double factor) override;
  void writeMagnitude(const at::Tensor& tail, int rank, double ratio) const override;
  void unpack(BucketMemory& memory, const std::vector<size_t>& slots, double factor) const override;

 private:
  bool measures_;
  Magnitude magnitude_; ///< of the gradients packed since begin()
};

/// One sparse gradient, coalesced: home is a tensor of its own, because the all-reduce puts other elements into it, and .grad is the
/// user's until unpack().
class SparsePacker final : public Packer {
 public:
  void pack(BucketMemory& memory, const Slot& slot, double factor) override;
  void packZeros(BucketMemory& memory) const override;
  void takeResult(BucketMemory& memory, const at::Tensor& result) const override;
  void unpack(BucketMemory& memory, const std::vector<size_t>& slots, double factor) const override;
};

} // namespace pycomm
