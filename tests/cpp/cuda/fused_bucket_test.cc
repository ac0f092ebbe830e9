// Packing and unpacking: the kernels' own functions on the host, against conversions element by element.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "base/error.h"
#include "cuda/bucket_kernel.h"
#include "device/fused_bucket.h"
#include "host_device.h"
#include "numeric/convert.h"

namespace pycomm::cuda {
namespace {

using testing::HostDevice;

struct Pair {
  DType grad;
  DType wire;
};
const std::vector<Pair> kPairs = {
    {DType::Float32, DType::Float32},
    {DType::Float32, DType::Float16},
    {DType::Float32, DType::BFloat16},
    {DType::Float32, DType::Float8E4M3},
    {DType::Float32, DType::Float8E5M2},
    {DType::Float16, DType::Float16},
    {DType::Float16, DType::Float32},
    {DType::BFloat16, DType::BFloat16},
    {DType::BFloat16, DType::Float32}};

constexpr std::byte kGuard{0xa5};

/// Gradients at given distances from 16-byte boundaries, with guard bytes between them, and the bucket alike.
struct Fixture {
  DType dtype;
  std::vector<std::byte> memory;
  std::vector<Gradient> gradients;
  std::vector<float> flat; ///< what the gradients hold, as fp32

  Fixture(DType type, const std::vector<size_t>& sizes, size_t shift, uint32_t seed) : dtype(type) {
    const size_t element = elementSize(type);
    size_t nbytes = 64;
    for (const size_t size : sizes) {
      nbytes += (size + 32) * element + 64;
    }
    memory.assign(nbytes, kGuard);
    std::mt19937 random(seed);
    size_t at = 16 - reinterpret_cast<uintptr_t>(memory.data()) % 16;
    for (size_t g = 0; g < sizes.size(); ++g) {
      at += 16 + (16 - (reinterpret_cast<uintptr_t>(memory.data()) + at) % 16) % 16;
      at += element * ((g * shift) % (16 / element)); // misaligned, each in another way
      std::vector<float> values(sizes[g]);
      for (float& value : values) {
        value = std::ldexp(std::normal_distribution<float>()(random), static_cast<int>(random() % 24) - 16);
      }
      convertScalar(type, memory.data() + at, DType::Float32, values.data(), values.size());
      convertScalar(DType::Float32, values.data(), type, memory.data() + at, values.size());
      flat.insert(flat.end(), values.begin(), values.end());
      gradients.push_back({memory.data() + at, sizes[g]});
      at += sizes[g] * element;
    }
  }
};

std::vector<size_t> manySizes() {
  std::vector<size_t> sizes = {1, 0, 3, 64, kTile - 5, kTile, 2 * kTile + 7, 1000, 1, 1, 2, 17, 0, 4096};
  for (size_t i = 0; i < 60; ++i) {
    sizes.push_back(i);
  }
  return sizes;
}

TEST(Bucket, PackIsTheConversionOfEachElementAndNothingElse) {
  for (const Pair pair : kPairs) {
    for (const size_t shift : {0, 1, 3}) {
      for (const size_t bucket_shift : {0, 1, 2}) {
        for (const uint32_t threads : {1, 7, 256}) {
          const Fixture grads(pair.grad, manySizes(), shift, 11);
          HostDevice device(threads);
          const FusedBucket plan = planFusedBucket(grads.gradients.data(), grads.gradients.size(), pair.grad);
          ASSERT_EQ(plan.numel, grads.flat.size());
          ASSERT_EQ(plan.launches.size(), 1U);
          const size_t element = elementSize(pair.wire);
          std::vector<std::byte> memory((plan.numel + bucket_shift) * element + 64, kGuard);
          std::byte* bucket = memory.data() + 16 + bucket_shift * element;
          PackStats stats;
          packBucket(device, plan, pair.grad, pair.wire, bucket, 0.25F, &stats, nullptr);
          EXPECT_EQ(device.launches, 1);

          std::vector<std::byte> expected(plan.numel * element);
          convertScalar(pair.wire, expected.data(), DType::Float32, grads.flat.data(), grads.flat.size(), 0.25F);
          ASSERT_EQ(std::memcmp(bucket, expected.data(), expected.size()), 0)
              << dtypeName(pair.grad) << " to " << dtypeName(pair.wire) << " shift " << shift;
          for (const std::byte* edge : {bucket - 1, bucket + expected.size()}) {
            EXPECT_EQ(*edge, kGuard) << "written beyond the bucket";
          }
          uint32_t max_abs_bits = 0;
          for (const float value : grads.flat) {
            max_abs_bits = std::max(max_abs_bits, magnitudeBits(value));
          }
          EXPECT_EQ(stats.max_abs_bits, max_abs_bits);
        }
      }
    }
  }
}

TEST(Bucket, UnpackScattersAndLeavesTheRestAlone) {
  for (const Pair pair : kPairs) {
    for (const size_t shift : {0, 1, 3}) {
      Fixture grads(pair.grad, manySizes(), shift, 12);
      HostDevice device(7);
      const FusedBucket plan = planFusedBucket(grads.gradients.data(), grads.gradients.size(), pair.grad);
      std::vector<std::byte> bucket(plan.numel * elementSize(pair.wire));
      convertScalar(pair.wire, bucket.data(), DType::Float32, grads.flat.data(), grads.flat.size());
      std::vector<std::byte> before = grads.memory;
      unpackBucket(device, plan, pair.grad, pair.wire, bucket.data(), 1.0F / 3, nullptr);

      size_t at = 0;
      for (const Gradient& gradient : grads.gradients) {
        const size_t offset = static_cast<size_t>(static_cast<std::byte*>(gradient.ptr) - grads.memory.data());
        convertScalar(
            pair.grad,
            before.data() + offset,
            pair.wire,
            bucket.data() + at * elementSize(pair.wire),
            gradient.numel,
            1.0F / 3);
        at += gradient.numel;
      }
      ASSERT_EQ(before, grads.memory) << dtypeName(pair.grad) << " from " << dtypeName(pair.wire);
    }
  }
}

TEST(Bucket, RoundTripStaysWithinTheFormatsErrorAgainstFloat64) {
  const std::vector<size_t> sizes(200, 313);
  Fixture grads(DType::Float32, sizes, 1, 13);
  HostDevice device;
  const FusedBucket plan = planFusedBucket(grads.gradients.data(), grads.gradients.size(), DType::Float32);
  std::vector<uint16_t> bucket(plan.numel);
  packBucket(device, plan, DType::Float32, DType::Float16, bucket.data(), 16.0F, nullptr, nullptr);
  unpackBucket(device, plan, DType::Float32, DType::Float16, bucket.data(), 1.0F / (16 * 4), nullptr);
  size_t at = 0;
  for (const Gradient& gradient : grads.gradients) {
    for (size_t i = 0; i < gradient.numel; ++i, ++at) {
      const double exact = static_cast<double>(grads.flat[at]) / 4;
      const double bound = std::abs(exact) * 0x1p-11 + 0x1p-24 / 16 / 4;
      ASSERT_NEAR(static_cast<float*>(gradient.ptr)[i], exact, bound);
    }
  }
}

TEST(Bucket, CountsWhatRoundingMakesInfiniteAndNotWhatWasInfiniteBefore) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> values = {1, 65519, 65520, -65536, infinity, nan, -infinity, 7e4F, 0};
  values.resize(40, 2.0F);
  const Gradient gradient{values.data(), values.size()};
  const FusedBucket plan = planFusedBucket(&gradient, 1, DType::Float32);
  HostDevice device;
  std::vector<uint16_t> bucket(values.size());
  PackStats stats;
  packBucket(device, plan, DType::Float32, DType::Float16, bucket.data(), 1.0F, &stats, nullptr);
  EXPECT_EQ(stats.overflows, 3U);
  EXPECT_EQ(stats.max_abs_bits, floatBits(7e4F)) << "of the finite ones";
  EXPECT_EQ(stats.non_finite, 1U);
  EXPECT_EQ(bucket[5], 0x7e00);
  EXPECT_EQ(bucket[6], 0xfc00);

  PackStats scaled;
  packBucket(device, plan, DType::Float32, DType::Float16, bucket.data(), 0.5F, &scaled, nullptr);
  EXPECT_EQ(scaled.overflows, 0U);

  std::vector<uint8_t> bytes(values.size());
  PackStats narrow; // e4m3 has no infinity: 464 is the last that rounds to 448
  values = {464, 465, -500, 448, 0};
  const Gradient short_gradient{values.data(), values.size()};
  packBucket(
      device,
      planFusedBucket(&short_gradient, 1, DType::Float32),
      DType::Float32,
      DType::Float8E4M3,
      bytes.data(),
      1.0F,
      &narrow,
      nullptr);
  EXPECT_EQ(narrow.overflows, 2U);
}

TEST(Bucket, AGradientThatIsNotThereTravelsAsZerosAndIsNotWritten) {
  std::vector<float> first(100, 1.0F);
  std::vector<float> last(100, 3.0F);
  const std::vector<Gradient> gradients = {{first.data(), 100}, {nullptr, 37}, {nullptr, 5}, {last.data(), 100}};
  const FusedBucket plan = planFusedBucket(gradients.data(), gradients.size(), DType::Float32);
  EXPECT_EQ(plan.segments.size(), 3U) << "neighbours without memory are one segment";
  HostDevice device;
  std::vector<float> bucket(plan.numel, 9.0F);
  packBucket(device, plan, DType::Float32, DType::Float32, bucket.data(), 1.0F, nullptr, nullptr);
  EXPECT_EQ(std::accumulate(bucket.begin(), bucket.end(), 0.0F), 400.0F);
  EXPECT_EQ(bucket[100], 0.0F);
  EXPECT_EQ(bucket[141], 0.0F);
  unpackBucket(device, plan, DType::Float32, DType::Float32, bucket.data(), 2.0F, nullptr);
  EXPECT_EQ(first[99], 2.0F);
  EXPECT_EQ(last[0], 6.0F);
}

TEST(Plan, JoinsNeighboursAndStartsANewLaunchWhenTheArgumentsAreFull) {
  std::vector<float> values(3 * (2 * kMaxSegments + 1));
  std::vector<Gradient> gradients;
  for (size_t i = 0; i < 2 * kMaxSegments + 1; ++i) {
    gradients.push_back({values.data() + 3 * i, 2}); // a hole of one after each
  }
  FusedBucket plan = planFusedBucket(gradients.data(), gradients.size(), DType::Float32);
  ASSERT_EQ(plan.launches.size(), 3U);
  EXPECT_EQ(plan.launches[1].begin, 2 * kMaxSegments);
  EXPECT_EQ(plan.launches[1].numel, 2 * kMaxSegments);
  EXPECT_EQ(plan.launches[2].count, 1U);
  EXPECT_EQ(plan.segments[kMaxSegments].end, 2U) << "counted from the launch's start";
  HostDevice device;
  std::iota(values.begin(), values.end(), 0.0F);
  std::vector<float> bucket(plan.numel);
  packBucket(device, plan, DType::Float32, DType::Float32, bucket.data(), 1.0F, nullptr, nullptr);
  EXPECT_EQ(device.launches, 3);
  for (size_t i = 0; i < bucket.size(); ++i) {
    ASSERT_EQ(bucket[i], static_cast<float>(i / 2 * 3 + i % 2));
  }

  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i].ptr = values.data() + 2 * i; // no holes
  }
  plan = planFusedBucket(gradients.data(), gradients.size(), DType::Float32);
  EXPECT_EQ(plan.segments.size(), 1U);
}

TEST(Plan, RefusesWhatIsNoGradient) {
  alignas(16) std::byte memory[16] = {};
  const Gradient crooked{memory + 2, 1};
  EXPECT_THROW(static_cast<void>(planFusedBucket(&crooked, 1, DType::Float32)), Error);
  EXPECT_NO_THROW(static_cast<void>(planFusedBucket(&crooked, 1, DType::Float16)));
  const Gradient endless{memory, uint64_t{1} << 60};
  EXPECT_THROW(static_cast<void>(planFusedBucket(&endless, 1, DType::Float16)), Error);
  EXPECT_TRUE(planFusedBucket(nullptr, 0, DType::Float32).launches.empty());
}

TEST(Plan, AddressesBeyondTwoToTheThirtyOneElementsAreExact) {
  // No memory behind these: only addresses are looked at.
  auto* const a = reinterpret_cast<void*>(uintptr_t{1} << 44);
  auto* const b = reinterpret_cast<void*>(uintptr_t{1} << 45);
  constexpr uint64_t kLarge = 5'000'000'001; // more than 2^32
  const std::vector<Gradient> gradients = {{a, kLarge}, {b, kLarge}};
  const FusedBucket plan = planFusedBucket(gradients.data(), gradients.size(), DType::Float32);
  HostDevice device;
  const BucketArgs args = argsOf(plan, plan.launches.at(0), nullptr, 2, 1.0F, nullptr);
  const auto runs = [&](uint64_t tile) {
    std::vector<std::pair<uintptr_t, uint32_t>> found;
    uint64_t next = tile * kTile;
    forEachRun(args, tile, 4, [&](char* grad, uint64_t at, uint32_t numel) {
      EXPECT_EQ(at, next);
      next += numel;
      found.emplace_back(reinterpret_cast<uintptr_t>(grad), numel);
    });
    EXPECT_EQ(next, std::min(2 * kLarge, (tile + 1) * kTile));
    return found;
  };
  const uint64_t edge = kLarge / kTile; // the tile that holds the end of a and the start of b
  const auto both = runs(edge);
  ASSERT_EQ(both.size(), 2U);
  EXPECT_EQ(both[0].first, reinterpret_cast<uintptr_t>(a) + edge * kTile * 4);
  EXPECT_EQ(both[0].second, kLarge - edge * kTile);
  EXPECT_EQ(both[1].first, reinterpret_cast<uintptr_t>(b));
  const auto last = runs(tileCount(2 * kLarge) - 1);
  ASSERT_EQ(last.size(), 1U);
  EXPECT_EQ(last[0].first + last[0].second * 4, reinterpret_cast<uintptr_t>(b) + kLarge * 4);
}

TEST(ExponentCode, IsFrexpsExponent) {
  EXPECT_EQ(exponentCode(0, 0), 0);
  EXPECT_EQ(exponentCode(0, 1), kNonFiniteCode) << "zeros, and a NaN";
  for (uint32_t bits = 1; bits < kFloatInfinity; bits += bits < 0x1000000U ? 4097 : 65521) {
    int exponent = 0;
    static_cast<void>(std::frexp(floatOf(bits), &exponent));
    ASSERT_EQ(exponentCode(bits, 0), kExponentBias + exponent) << std::hex << bits;
    ASSERT_EQ(exponentCode(bits, 1), kExponentBias + exponent + kNonFiniteCode) << std::hex << bits;
  }
}

TEST(ExponentCode, IsWrittenToTheRanksOwnElement) {
  HostDevice device;
  PackStats stats;
  stats.max_abs_bits = floatBits(-3.0F) & 0x7fffffffU;
  std::vector<uint16_t> tail(100, 0xffff);
  device.writeExponent({&stats, tail.data(), 100, 77}, nullptr);
  for (size_t i = 0; i < tail.size(); ++i) {
    EXPECT_EQ(Half::load(tail[i]), i == 77 ? 202.0F : 0.0F);
  }
}

} // namespace
} // namespace pycomm::cuda
