#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "base/codec.h"

namespace pycomm {

/// One parameter of the model, trainable or frozen.
struct ReducedParam {
  at::Tensor tensor;
  std::string name; ///< for errors
  std::optional<at::ScalarType> wire_dtype; ///< none: its own
  Codec codec =
      Codec::None; ///< encodes the sums: those of the comm hook if there is one, else those of a wire dtype of fp32
  bool sparse = false; ///< its gradients are sparse
  at::ScalarType dtype = tensor.scalar_type(); ///< at construction, as `device` is
  at::Device device = tensor.device();
};

} // namespace pycomm
