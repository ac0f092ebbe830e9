#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <vector>

namespace pycomm {

/// The streams on which the CUDA gradients of a bucket come.
///
/// note() is called on each one's; join() lets the caller's current stream go on behind all of them, so whatever is put onto it from
/// there on sees the gradients.
class GradStreams {
 public:
  explicit GradStreams(c10::Device device) : device_(device) {}

  void note();
  /// Whether any gradient came on another stream than the current one.
  bool join();

 private:
  c10::Device device_;
  std::vector<c10::Stream> streams_; ///< since the last join()
};

/// torch's current stream of a device, whatever its kind.
[[nodiscard]] c10::Stream currentStream(c10::Device device);

} // namespace pycomm
