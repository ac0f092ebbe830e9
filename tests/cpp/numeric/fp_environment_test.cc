#include "numeric/fp_environment.h"

#include <gtest/gtest.h>

#include <cfenv>
#include <cstdint>

#include "numeric/convert.h"
#include "numeric/reduce.h"
#include "numeric_testing.h"

namespace pycomm {
namespace {

using testing::AtLevel;
using testing::Bytes;
using testing::describe;
using testing::levels;
using testing::sameBits;
using testing::samples;

// As torch.set_flush_denormal sets it. Returns what was there.
uint64_t setFlushMode() {
#if defined(__x86_64__)
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(before | 0x8040); // FTZ and DAZ
  return before;
#elif defined(__aarch64__)
  uint64_t before = 0;
  asm volatile("mrs %0, fpcr" : "=r"(before));
  asm volatile("msr fpcr, %0" : : "r"(before | (uint64_t{1} << 24)));
  return before;
#endif
}

uint64_t control() {
#if defined(__x86_64__)
  return _mm_getcsr() & 0xffc0U;
#elif defined(__aarch64__)
  uint64_t word = 0;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return word;
#endif
}

void restore(uint64_t word) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<uint32_t>(word));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(word));
#endif
}

struct Results {
  Bytes sum, many, average, halves;
};

Results compute(DType dtype, const Bytes& a, const Bytes& b, size_t numel) {
  Results out{Bytes(a.size()), Bytes(a.size()), Bytes(a.size()), Bytes(numel * 2)};
  const void* sources[] = {a.data(), b.data(), a.data()};
  reduce(dtype, ReduceOp::Sum, out.sum.data(), a.data(), b.data(), numel);
  reduceMany(dtype, ReduceOp::Avg, out.many.data(), sources, 3, numel, 3);
  divide(dtype, out.average.data(), a.data(), numel, 3);
  if (dtype == DType::Float32) {
    convert(DType::BFloat16, out.halves.data(), dtype, a.data(), numel, 0.5F);
  }
  return out;
}

// The settings of the thread that happens to drive a lane must not reach the numbers, and must be there afterwards.
TEST(FpEnvironment, CallersSettingsNeitherMatterNorChange) {
  constexpr size_t kNumel = 517;
  for (const SimdLevel level : levels()) {
    const AtLevel at(level);
    for (const DType dtype : {DType::Float32, DType::Float64, DType::Float16, DType::BFloat16, DType::Float8E5M2}) {
      Bytes a = samples(dtype, kNumel, 101);
      Bytes b = samples(dtype, kNumel, 102);
      for (size_t i = 0; i < kNumel; i += 2) { // every other number subnormal
        const size_t top = (i + 1) * elementSize(dtype) - 1;
        a[top] = 0;
        b[top] = 0x80;
        if (dtype == DType::Float32 || dtype == DType::Float64 || dtype == DType::BFloat16) {
          a[top - 1] &= 0x0f;
          b[top - 1] &= 0x0f;
        }
      }
      const Results want = compute(dtype, a, b, kNumel);
      for (const int rounding : {FE_TONEAREST, FE_TOWARDZERO, FE_UPWARD}) {
        std::fesetround(rounding);
        const uint64_t before = setFlushMode();
        const uint64_t set = control();
        const Results got = compute(dtype, a, b, kNumel);
        const uint64_t after = control();
        restore(before);
        std::fesetround(FE_TONEAREST);
        EXPECT_EQ(after, set);
        for (const auto& [mine, reference] :
             {std::pair{&got.sum, &want.sum},
              std::pair{&got.many, &want.many},
              std::pair{&got.average, &want.average},
              std::pair{&got.halves, &want.halves}}) {
          EXPECT_TRUE(sameBits(1, *mine, *reference)) << describe(level, dtype, ReduceOp::Sum);
        }
      }
    }
  }
}

} // namespace
} // namespace pycomm
