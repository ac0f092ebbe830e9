#pragma once

#include <cstdint>
#include <string>

#include "base/dtype.h"

namespace pycomm {

/// How elements of several ranks become one. The numbers are part of the wire format.
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

/// Why `op` has no meaning on `dtype` ("AVG of int32 is undefined: …"), or "" when it has one.
/// Pure: every rank that passes the same pair gets the same answer, before anything moves.
[[nodiscard]] std::string whyUnsupported(ReduceOp op, DType dtype);

} // namespace pycomm
