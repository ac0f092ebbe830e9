#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace pycomm {

/// Throws Error(Unsupported) naming the dtype.
[[nodiscard]] DType toDType(c10::ScalarType type);

[[nodiscard]] ReduceOp toReduceOp(const c10d::ReduceOp& op);

/// The factor of PREMUL_SUM; 1 for every other op. Throws Error(Unsupported) for a factor that is a tensor of several elements.
[[nodiscard]] double premulFactor(const c10d::ReduceOp& op);

} // namespace pycomm
