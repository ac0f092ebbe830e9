#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <vector>

namespace pycomm {

/// The streams on which autograd makes the CUDA gradients of a bucket.
///
/// note() is called on the stream of each gradient. join() makes the caller's current stream wait for all of them, so later work on it
/// sees the gradients.
class GradStreams {
 public:
  explicit GradStreams(c10::Device device) : device_(device) {}

  void note();
  /// True if a gradient came on another stream than the current one.
  bool join();

 private:
  c10::Device device_;
  std::vector<c10::Stream> streams_; ///< since the last join()
};

/// torch's current stream of a device of any kind.
[[nodiscard]] c10::Stream currentStream(c10::Device device);

} // namespace pycomm
