#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <string>
#include <vector>

#include "cuda/c_api.h"

namespace pycomm {

/// What a bucket of CUDA gradients needs besides torch: the order of streams, and the CUDA library's bucket kernels.
///
/// Gradients may come on several streams. note() is called on each one's; join() lets the caller's current stream go on
/// behind all of them, and whatever is put onto it from there on sees the gradients.
class DeviceBucket {
 public:
  /// Throws Error(Unsupported) if the CUDA library is not there, or has no code for the device.
  DeviceBucket(const std::string& library_path, c10::Device device);

  /// The dtype that kernels take gradients of `grad` in, for a bucket of `wire`: `grad` itself, else float32.
  [[nodiscard]] static at::ScalarType kernelType(at::ScalarType grad, at::ScalarType wire);
  /// Whether there are kernels that leave the dtype as it is.
  [[nodiscard]] static bool packsAsItIs(at::ScalarType dtype);

  void note();
  void join();
  /// For gradients that are dropped now: the stream of the last join() may still read what was made on another one.
  void keep(const std::vector<at::Tensor>& gradients) const;

  /// One launch on the caller's current stream: gradients, one behind the other, times `factor` into `bucket`, each rounded once.
  /// Undefined ones are zeros. `stats`: undefined, or of newStats().
  void pack(
      const std::vector<at::Tensor>& gradients,
      const std::vector<size_t>& numels,
      at::ScalarType dtype,
      const at::Tensor& bucket,
      float factor,
      const at::Tensor& stats) const;
  /// The way back; undefined gradients are left out.
  void unpack(
      const std::vector<at::Tensor>& gradients,
      const std::vector<size_t>& numels,
      at::ScalarType dtype,
      const at::Tensor& bucket,
      float factor) const;

  /// For pack(): int32 elements, of which the kernels write the largest magnitude's bits to kLargest.
  [[nodiscard]] at::Tensor newStats() const;
  static constexpr int64_t kLargest = 2;

 private:
  [[nodiscard]] c10::Stream currentStream() const;

  const PycommCudaTable* library_; ///< never unloaded
  c10::Device device_;
  std::vector<c10::Stream> streams_; ///< on which gradients have come since the last join()
  bool several_ = false; ///< at the last join(): gradients had come on another stream than that
};

} // namespace pycomm
