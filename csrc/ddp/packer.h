#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <string>
#include <vector>

#include "ddp/bucket_memory.h"

namespace pycomm {

/// Fills and empties a bucket: moves gradients from parameters' .grad to flat memory, and averages back.
///
///     packer    gradients                                             packs
///     home      in their own dtype, to where .grad may lie itself     each as it comes
///     cast      in another dtype, on the CPU                          each as it comes
///     sparse    sparse COO tensors, on any device                     the one of its bucket
///     fused     on a CUDA device, of the dtypes with a kernel         all in one launch, when sealed
///
/// A CUDA gradient of another dtype (float64, complex) is packed by the home packer, with torch's kernels.
///
/// Every function is called without autograd recording, and on a CUDA device on a stream that has waited for the gradients.
class Packer {
 public:
  Packer() = default;
  virtual ~Packer() = default;
  Packer(const Packer&) = delete;
  Packer& operator=(const Packer&) = delete;

  /// Forgets the magnitude of what was packed before.
  virtual void begin() {}
  /// The gradient of one slot has come: packs it, times `factor`. A parameter without one counts as zeros.
  virtual void pack(BucketMemory& memory, const Slot& slot, double factor) = 0;
  /// As pack(), while the factor is only guessed. Returns the factor that the gradient was packed with, from which repack() goes on.
  [[nodiscard]] virtual double packAhead(BucketMemory& memory, const Slot& slot, double guess) {
    pack(memory, slot, guess);
    return guess;
  }
  /// The factor is known: the slot, packed ahead times `before`, has the bits of pack() with `factor`.
  virtual void repack(BucketMemory& memory, const Slot& slot, double /*before*/, double factor) {
    pack(memory, slot, factor); // .grad is as it was
  }
  /// All gradients have come. `streams_differ`: some were made on another stream than the current one.
  virtual void seal(BucketMemory& /*memory*/, double /*factor*/, bool /*streams_differ*/) {}
  /// Of a bucket with a tail: writes the ExponentCode of the largest magnitude packed since begin(), with this ratio, to its element `rank`, zeros
  /// to the others.
  virtual void writeMagnitude(const BucketMemory& /*memory*/, int /*rank*/, double /*ratio*/) const {}
  /// Zeros travel, and no .grad is read or written.
  virtual void packZeros(BucketMemory& memory) const {
    memory.zero();
  }
  /// A comm hook's result takes the place of the gradients in home. Throws if it has another size.
  virtual void takeResult(BucketMemory& memory, const at::Tensor& result) const;
  /// Writes the sums of these slots, times `factor`, to their parameters' .grad.
  virtual void unpack(BucketMemory& memory, const std::vector<size_t>& slots, double factor) const = 0;
};

/// `cuda_library`: the path of libpycomm_cuda.so, for gradients on a CUDA device. Throws Error(Unsupported) if they need it and it is missing,
/// or has no code for the device.
[[nodiscard]] std::unique_ptr<Packer> makePacker(const BucketMemory& memory, const std::string& cuda_library);

/// The gradient of an embedding of which no row was used: ranks must agree on its one sparse dimension.
[[nodiscard]] at::Tensor emptySparse(const at::Tensor& param);

/// torch's current stream of a device of any kind.
[[nodiscard]] c10::Stream currentStream(c10::Device device);

} // namespace pycomm
