#include "base/dtype.h"

namespace pycomm {

size_t elementSize(DType dtype) noexcept {
  switch (dtype) {
    case DType::UInt8:
    case DType::Int8:
    case DType::Bool:
    case DType::Float8E4M3:
    case DType::Float8E5M2:
      return 1;
    case DType::UInt16:
    case DType::Int16:
    case DType::Float16:
    case DType::BFloat16:
      return 2;
    case DType::UInt32:
    case DType::Int32:
    case DType::Float32:
      return 4;
    case DType::UInt64:
    case DType::Int64:
    case DType::Float64:
    case DType::Complex64:
      return 8;
    case DType::Complex128:
      return 16;
  }
  return 0; // a value outside the enumeration, read from the wire: callers check for 0
}

const char* dtypeName(DType dtype) noexcept {
  switch (dtype) {
    case DType::UInt8:
      return "uint8";
    case DType::Int8:
      return "int8";
    case DType::UInt16:
      return "uint16";
    case DType::Int16:
      return "int16";
    case DType::UInt32:
      return "uint32";
    case DType::Int32:
      return "int32";
    case DType::UInt64:
      return "uint64";
    case DType::Int64:
      return "int64";
    case DType::Bool:
      return "bool";
    case DType::Float16:
      return "float16";
    case DType::BFloat16:
      return "bfloat16";
    case DType::Float32:
      return "float32";
    case DType::Float64:
      return "float64";
    case DType::Complex64:
      return "complex64";
    case DType::Complex128:
      return "complex128";
    case DType::Float8E4M3:
      return "float8_e4m3fn";
    case DType::Float8E5M2:
      return "float8_e5m2";
  }
  return "unknown";
}

bool isFloatingPoint(DType dtype) noexcept {
  return dtype == DType::Float16 || dtype == DType::BFloat16 || dtype == DType::Float32 || dtype == DType::Float64 ||
      dtype == DType::Float8E4M3 || dtype == DType::Float8E5M2;
}

bool isComplex(DType dtype) noexcept {
  return dtype == DType::Complex64 || dtype == DType::Complex128;
}

} // namespace pycomm
