#include "numeric/reduce.h"

#include <string>

#include "base/error.h"
#include "numeric/fp_environment.h"
#include "numeric/kernels.h"

namespace pycomm {
namespace {

using numeric::activeKernels;
using numeric::FpEnvironment;
using numeric::KernelSet;
using numeric::kScalarKernels;

// The arguments for the kernels: apart from their factors, Avg and PremulSum are sums, and a complex sum is a sum of
// twice as many reals.
struct Loop {
  DType dtype;
  ReduceOp op;
  size_t numel;
};

Loop realParts(DType dtype, ReduceOp op, size_t numel) {
  switch (dtype) {
    case DType::Complex64:
      return {DType::Float32, op, numel * 2};
    case DType::Complex128:
      return {DType::Float64, op, numel * 2};
    case DType::UInt8:
    case DType::Int8:
    case DType::UInt16:
    case DType::Int16:
    case DType::UInt32:
    case DType::Int32:
    case DType::UInt64:
    case DType::Int64:
    case DType::Bool:
    case DType::Float16:
    case DType::BFloat16:
    case DType::Float32:
    case DType::Float64:
    case DType::Float8E4M3:
    case DType::Float8E5M2:
      return {dtype, op, numel};
  }
  return {dtype, op, numel};
}

Loop loopFor(DType dtype, ReduceOp op, size_t numel) {
  const std::string refusal = whyUnsupported(op, dtype);
  if (!refusal.empty()) {
    throw Error(ErrorCode::Unsupported, refusal);
  }
  if (op == ReduceOp::None) {
    throw Error(ErrorCode::InvalidArgument, "NONE is not a reduction: it only moves bytes");
  }
  if (op == ReduceOp::Avg || op == ReduceOp::PremulSum) {
    op = ReduceOp::Sum;
  }
  return op == ReduceOp::Product ? Loop{dtype, op, numel} : realParts(dtype, op, numel);
}

void reduceWith(const KernelSet& set, Loop loop, void* dst, const void* a, const void* b) {
  auto kernel = set.reduce(loop.dtype, loop.op);
  if (kernel == nullptr) {
    kernel = kScalarKernels.reduce(loop.dtype, loop.op);
  }
  const FpEnvironment environment;
  kernel(dst, a, b, loop.numel);
}

void requireFloats(const char* what, DType dtype) {
  if (!isFloatingPoint(dtype) && !isComplex(dtype)) {
    throw Error(
        ErrorCode::Unsupported,
        std::string(what) + " of " + dtypeName(dtype) + " is undefined: the result is not an integer");
  }
}

void requirePositive(int64_t divisor) {
  if (divisor < 1) {
    throw Error(ErrorCode::InvalidArgument, "an average needs a divisor of 1 or more, not " + std::to_string(divisor));
  }
}

} // namespace

void reduce(DType dtype, ReduceOp op, void* dst, const void* a, const void* b, size_t numel) {
  reduceWith(activeKernels(), loopFor(dtype, op, numel), dst, a, b);
}

void reduceScalar(DType dtype, ReduceOp op, void* dst, const void* a, const void* b, size_t numel) {
  reduceWith(kScalarKernels, loopFor(dtype, op, numel), dst, a, b);
}

void reduceMany(
    DType dtype,
    ReduceOp op,
    void* dst,
    const void* const* sources,
    size_t source_count,
    size_t numel,
    int64_t divisor) {
  const Loop loop = loopFor(dtype, op, numel);
  requirePositive(divisor);
  if (source_count == 0) {
    throw Error(ErrorCode::InvalidArgument, "a reduction needs at least one source");
  }
  if (divisor != 1 && op != ReduceOp::Avg) {
    throw Error(ErrorCode::InvalidArgument, std::string("only AVG divides, not ") + reduceOpName(op));
  }
  auto kernel = activeKernels().reduceMany(loop.dtype, loop.op);
  if (kernel == nullptr) {
    kernel = kScalarKernels.reduceMany(loop.dtype, loop.op);
  }
  const FpEnvironment environment;
  kernel(dst, sources, source_count, loop.numel, static_cast<double>(divisor));
}

void scale(DType dtype, void* dst, const void* src, size_t numel, double factor) {
  requireFloats("scaling", dtype);
  const Loop loop = realParts(dtype, ReduceOp::PremulSum, numel);
  auto kernel = activeKernels().scale(loop.dtype);
  if (kernel == nullptr) {
    kernel = kScalarKernels.scale(loop.dtype);
  }
  const FpEnvironment environment;
  kernel(dst, src, loop.numel, factor);
}

void divide(DType dtype, void* dst, const void* src, size_t numel, int64_t divisor) {
  requireFloats("division", dtype);
  requirePositive(divisor);
  const Loop loop = realParts(dtype, ReduceOp::Avg, numel);
  auto kernel = activeKernels().divide(loop.dtype);
  if (kernel == nullptr) {
    kernel = kScalarKernels.divide(loop.dtype);
  }
  const FpEnvironment environment;
  kernel(dst, src, loop.numel, static_cast<double>(divisor));
}

} // namespace pycomm
