#include "numeric/convert.h"

#include <string>

#include "base/error.h"
#include "numeric/fp_environment.h"
#include "numeric/kernels.h"

namespace pycomm {
namespace {

constexpr uint32_t kInfinityBits = 0x7f800000U;

void convertWith(
    const numeric::KernelSet& set,
    DType to,
    void* dst,
    DType from,
    const void* src,
    size_t numel,
    float factor) {
  auto kernel = set.convert(to, from);
  if (kernel == nullptr) {
    kernel = numeric::kScalarKernels.convert(to, from);
  }
  if (kernel == nullptr) {
    throw Error(
        ErrorCode::Unsupported,
        std::string("no conversion from ") + dtypeName(from) + " to " + dtypeName(to) +
            ": only float32, float16, bfloat16 and the two float8 formats are converted");
  }
  const numeric::FpEnvironment environment;
  kernel(dst, src, numel, factor);
}

} // namespace

void convert(DType to, void* dst, DType from, const void* src, size_t numel, float factor) {
  convertWith(numeric::activeKernels(), to, dst, from, src, numel, factor);
}

void convertScalar(DType to, void* dst, DType from, const void* src, size_t numel, float factor) {
  convertWith(numeric::kScalarKernels, to, dst, from, src, numel, factor);
}

Magnitude magnitudeOf(const float* values, size_t numel) noexcept {
  const numeric::BlockSummary summary = numeric::activeKernels().summarize(values, numel);
  return {summary.max_bits, summary.special};
}

} // namespace pycomm
