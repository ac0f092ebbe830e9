#include "base/reduce_op.h"

namespace pycomm {

const char* reduceOpName(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::None:
      return "NONE";
    case ReduceOp::Sum:
      return "SUM";
    case ReduceOp::Avg:
      return "AVG";
    case ReduceOp::Product:
      return "PRODUCT";
    case ReduceOp::Min:
      return "MIN";
    case ReduceOp::Max:
      return "MAX";
    case ReduceOp::Band:
      return "BAND";
    case ReduceOp::Bor:
      return "BOR";
    case ReduceOp::Bxor:
      return "BXOR";
    case ReduceOp::PremulSum:
      return "PREMUL_SUM";
  }
  return "UNKNOWN";
}

std::string whyUnsupported(ReduceOp op, DType dtype) {
  const bool floating = isFloatingPoint(dtype);
  const bool complex = isComplex(dtype);
  const auto refuse = [&](const char* why) {
    return std::string(reduceOpName(op)) + " of " + dtypeName(dtype) + " is undefined: " + why;
  };
  switch (op) {
    case ReduceOp::None:
    case ReduceOp::Sum:
    case ReduceOp::Product:
      return "";
    case ReduceOp::Avg:
    case ReduceOp::PremulSum:
      if (floating || complex) {
        return "";
      }
      return refuse("the result is not an integer; use SUM, or convert to a floating-point dtype");
    case ReduceOp::Min:
    case ReduceOp::Max:
      return complex ? refuse("complex numbers have no order") : "";
    case ReduceOp::Band:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
      if (!floating && !complex) {
        return "";
      }
      return refuse("bitwise operations need an integer or bool dtype");
  }
  return refuse("unknown reduce op");
}

} // namespace pycomm
