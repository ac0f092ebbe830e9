#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/codec.h"

namespace pycomm {

// The settings of a wrapper, as its program gives them.

/// One parameter of the model, trainable or frozen.
struct ReducedParam {
  at::Tensor tensor;
  std::string name; ///< for errors
  std::optional<at::ScalarType> wire_dtype; ///< none: its own
  Codec codec =
      Codec::None; ///< encodes the sums: those of the comm hook if there is one, else those of a wire dtype of fp32
  bool sparse = false; ///< its gradients are sparse COO tensors
  at::ScalarType dtype = tensor.scalar_type(); ///< at construction, as `device` is
  at::Device device = tensor.device();
};

/// How full buckets get. A bucket is closed by the gradient that brings it to its cap, so it may be larger by that one.
struct BucketCaps {
  std::vector<size_t> nbytes; ///< of the first, second … bucket of a kind; the last one holds for all others
  size_t last_nbytes = 0; ///< cap of the bucket that completes last; 0: no cap of its own
};

struct ReducerOptions {
  BucketCaps caps;
  int64_t accumulate = 1; ///< backward passes per reduction
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = true;
  bool error_feedback = true; ///< the residual of a codec is added to the next step's gradients
  bool drops_nonfinite_steps = true; ///< the program does, so error feedback keeps nothing of one
  bool weighs = false; ///< ranks count by the weights of their passes: see PassWeights
  bool may_be_weightless =
      false; ///< a step in which no rank of the group has weight is one without averages, and no error
  bool has_sync_batch_norm =
      false; ///< so that the module's backward has collectives of its own, perhaps over the same group
  bool elastic = false; ///< a step may have to be summed again, among other members: see StepAgreement
  int64_t wrapper_number = 0; ///< among those of the group, the same on all ranks; 0: not known to be
  std::string cuda_library; ///< see makePacker()
};

} // namespace pycomm
