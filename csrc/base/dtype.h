#pragma once

#include <cstddef>
#include <cstdint>

namespace pycomm {

/// Element types that travel on the wire. The numbers are part of the wire format: never reuse one.
enum class DType : uint8_t {
  UInt8 = 0,
  Int8 = 1,
  UInt16 = 2,
  Int16 = 3,
  UInt32 = 4,
  Int32 = 5,
  UInt64 = 6,
  Int64 = 7,
  Bool = 8,
  Float16 = 9,
  BFloat16 = 10,
  Float32 = 11,
  Float64 = 12,
  Complex64 = 13,
  Complex128 = 14,
  Float8E4M3 = 15, ///< torch.float8_e4m3fn: no infinity, NaN is S.1111.111
  Float8E5M2 = 16, ///< torch.float8_e5m2: IEEE-like, has infinity
};

inline constexpr int kDTypeCount = 17;

/// Bytes of one element.
[[nodiscard]] size_t elementSize(DType dtype) noexcept;

/// The dtype's name in torch, "float32".
[[nodiscard]] const char* dtypeName(DType dtype) noexcept;

[[nodiscard]] bool isFloatingPoint(DType dtype) noexcept;
[[nodiscard]] bool isComplex(DType dtype) noexcept;

} // namespace pycomm
