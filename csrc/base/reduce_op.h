#pragma once

#include <cstdint>
#include <string>

#include "base/dtype.h"

namespace pycomm {

/// The operation that combines the elements of several ranks. The numbers are part of the wire format.
enum class ReduceOp : uint8_t {
  None = 0, ///< collectives that only move bytes
  Sum = 1,
  Avg = 2, ///< a sum, divided once by the number of ranks in the accumulation type
  Product = 3,
  Min = 4,
  Max = 5,
  Band = 6,
  Bor = 7,
  Bxor = 8,
  PremulSum = 9, ///< every rank's input is multiplied by its own factor, then summed
};

[[nodiscard]] const char* reduceOpName(ReduceOp op) noexcept;

/// The reason why `op` is not defined for `dtype` ("AVG of int32 is undefined: …"), or "" if it is.
/// Pure: every rank that passes the same pair gets the same result, before anything is sent.
[[nodiscard]] std::string whyUnsupported(ReduceOp op, DType dtype);

} // namespace pycomm
