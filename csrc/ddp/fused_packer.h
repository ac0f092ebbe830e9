#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "ddp/packer.h"
#include "device/device_runtime.h"

namespace pycomm {

/// The CUDA library's bucket kernels, for one device.
class BucketKernels {
 public:
  /// Throws Error(Unsupported) if the CUDA library is missing, or has no code for the device.
  BucketKernels(const std::string& library_path, c10::Device device);

  /// The dtype that kernels take gradients of `grad` in, for a bucket of `wire`: `grad` itself, else float32.
  [[nodiscard]] static at::ScalarType gradientType(at::ScalarType grad, at::ScalarType wire);
  /// Whether there are kernels that leave the dtype as it is.
  [[nodiscard]] static bool packsAsItIs(at::ScalarType dtype);

  /// One launch on the caller's current stream: gradients, one behind the other, times `factor` into `bucket`, each rounded once.
  /// Undefined ones are zeros. `stats`: undefined, or of newStats().
  void pack(
      const std::vector<at::Tensor>& gradients,
      const std::vector<size_t>& numels,
      at::ScalarType dtype,
      const at::Tensor& bucket,
      float factor,
      const at::Tensor& stats) const;
  /// From the bucket to the gradients; undefined gradients are left out.
  void unpack(
      const std::vector<at::Tensor>& gradients,
      const std::vector<size_t>& numels,
      at::ScalarType dtype,
      const at::Tensor& bucket,
      float factor) const;

  /// For pack(): a PackStats of zeros.
  [[nodiscard]] at::Tensor newStats() const;
  /// tail[rank] = WireScale::exponentCode() of what was packed with `stats`, the other elements = 0; one launch. float16.
  void writeExponent(const at::Tensor& stats, const at::Tensor& tail, int rank) const;

 private:
  cuda::DeviceRuntime* runtime_; ///< lives as long as the process
  c10::Device device_;
};

/// Gradients on a CUDA device: all slots of a bucket are packed by seal() and unpacked together, one kernel each. A gradient of another
/// dtype or memory order, or with a negation pending, goes through a copy.
class FusedPacker final : public Packer {
 public:
  FusedPacker(const BucketKernels& kernels, bool measures) : kernels_(kernels), measures_(measures) {}

  void begin() override {
    stats_.reset();
  }
  void pack(BucketMemory& /*memory*/, const Slot& /*slot*/, double /*factor*/) override {}
  void seal(BucketMemory& memory, double factor, bool streams_differ) override;
  void writeMagnitude(const at::Tensor& tail, int rank, double ratio) const override;
  void unpack(BucketMemory& memory, const std::vector<size_t>& slots, double factor) const override;

 private:
  BucketKernels kernels_;
  bool measures_;
  at::Tensor stats_; ///< of the gradients sealed since begin(); undefined before, and without measures_
};

} // namespace pycomm
