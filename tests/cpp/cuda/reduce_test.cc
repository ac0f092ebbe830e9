// The reduce kernel's functions on the host, against the numeric layer's reduceMany and against float64.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "base/error.h"
#include "host_device.h"
#include "numeric/convert.h"
#include "numeric/reduce.h"
#include "numeric/small_float.h"

namespace pycomm::cuda {
namespace {

using testing::HostDevice;

std::vector<DType> reducible() {
  return {
      DType::Float16,
      DType::BFloat16,
      DType::Float32,
      DType::Float64,
      DType::Int8,
      DType::UInt8,
      DType::Int32,
      DType::Int64};
}

/// Any bits at all: NaN, infinities, subnormals and both zeros are among them.
std::vector<std::byte> noise(size_t nbytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(nbytes);
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(random() % 8 == 0 ? (random() % 2 == 0 ? 0x00 : 0x80) : random());
  }
  return bytes;
}

TEST(Reduce, HasTheNumericLayersBits) {
  for (const DType dtype : reducible()) {
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max}) {
      if (!whyUnsupported(op, dtype).empty()) {
        continue;
      }
      const size_t element = elementSize(dtype);
      for (const size_t count : {1, 2, 3, 5}) {
        for (const size_t numel : {size_t{0}, size_t{1}, size_t{7}, size_t{64}, size_t{1003}}) {
          for (const bool alike : {true, false}) {
            std::vector<std::vector<std::byte>> memory;
            std::vector<const void*> sources;
            for (size_t s = 0; s < count; ++s) {
              memory.push_back(noise(numel * element + 32, static_cast<uint32_t>(s + 1)));
              sources.push_back(memory.back().data() + (alike ? element : element * s));
            }
            std::vector<std::byte> expected(numel * element + 1); // never without memory, which memcmp() does not want
            const auto divisor = static_cast<uint32_t>(count);
            reduceMany(dtype, op, expected.data(), sources.data(), count, numel, op == ReduceOp::Avg ? divisor : 1);
            std::vector<std::byte> out(numel * element + 32, std::byte{0x5a});
            std::byte* dst = out.data() + element;
            HostDevice device(5);
            reduceInto(device, dtype, op, dst, sources.data(), count, numel, divisor, nullptr);
            ASSERT_EQ(std::memcmp(dst, expected.data(), numel * element), 0)
                << dtypeName(dtype) << " " << reduceOpName(op) << " of " << count << " × " << numel;
            ASSERT_EQ(dst[-1], std::byte{0x5a});
            ASSERT_EQ(dst[numel * element], std::byte{0x5a});
          }
        }
      }
    }
  }
}

TEST(Reduce, AddsSmallFloatsInFp32AndRoundsOnce) {
  // 2048 + 1 + 1 + … in fp16 stays 2048 if each addition is rounded.
  std::vector<float> ones(64, 1.0F);
  std::vector<std::vector<uint16_t>> memory;
  std::vector<const void*> sources;
  for (size_t s = 0; s < 9; ++s) {
    std::vector<float> values(64, s == 0 ? 2048.0F : 1.0F);
    memory.emplace_back(64);
    convertScalar(DType::Float16, memory.back().data(), DType::Float32, values.data(), 64);
    sources.push_back(memory.back().data());
  }
  HostDevice device;
  reduceInto(device, DType::Float16, ReduceOp::Sum, memory[0].data(), sources.data(), 9, 64, 1, nullptr);
  EXPECT_EQ(numeric::HalfFormat::decode(memory[0][0]), 2056.0F) << "in place";
  EXPECT_EQ(numeric::HalfFormat::decode(memory[0][63]), 2056.0F);
}

TEST(Reduce, FollowsFloat64) {
  constexpr size_t kNumel = 4099;
  std::mt19937 random(3);
  std::vector<std::vector<float>> values(5, std::vector<float>(kNumel));
  std::vector<const void*> sources;
  for (auto& each : values) {
    for (float& value : each) {
      value = std::normal_distribution<float>()(random);
    }
    sources.push_back(each.data());
  }
  std::vector<float> out(kNumel);
  HostDevice device;
  reduceInto(device, DType::Float32, ReduceOp::Avg, out.data(), sources.data(), 5, kNumel, 5, nullptr);
  for (size_t i = 0; i < kNumel; ++i) {
    double sum = 0;
    double size = 0;
    for (const auto& each : values) {
      sum += each[i];
      size += std::abs(each[i]);
    }
    ASSERT_NEAR(out[i], sum / 5, size * 5 * 0x1p-24);
  }
}

TEST(Reduce, RefusesWhatItHasNoKernelFor) {
  HostDevice device;
  float value = 0;
  const void* source = &value;
  EXPECT_THROW(reduceInto(device, DType::Bool, ReduceOp::Sum, &value, &source, 1, 1, 1, nullptr), Error);
  EXPECT_THROW(reduceInto(device, DType::Int32, ReduceOp::Avg, &value, &source, 1, 1, 1, nullptr), Error);
  EXPECT_THROW(reduceInto(device, DType::Float32, ReduceOp::Band, &value, &source, 1, 1, 1, nullptr), Error);
  EXPECT_THROW(reduceInto(device, DType::Float32, ReduceOp::Sum, &value, &source, 0, 1, 1, nullptr), Error);
}

} // namespace
} // namespace pycomm::cuda
