// The device's codecs against the CPU's, byte by byte.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/codec.h"
#include "host_device.h"
#include "numeric/codec.h"

namespace pycomm::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Values of all sizes, with what is special here and there.
std::vector<float> valuesOf(size_t numel, unsigned seed, bool special) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<uint32_t> bits;
  std::vector<float> values(numel);
  for (size_t i = 0; i < numel; ++i) {
    const size_t block = i / 256 % 8;
    values[i] = normal(random) * std::ldexp(1.0F, static_cast<int>(block) * 30 - 130); // up to 2^80, down to subnormals
    if (block == 7) { // any bits at all
      values[i] = floatOf(bits(random));
      values[i] = special || std::isfinite(values[i]) ? values[i] : std::numeric_limits<float>::max();
    } else if (special && i % 97 == 0) {
      const float odd[] = {kInfinity, -kInfinity, std::nanf(""), -0.0F};
      values[i] = odd[i / 97 % 4];
    }
  }
  return values;
}

class CodecKernel : public ::testing::TestWithParam<Codec> {};

TEST_P(CodecKernel, HasTheBytesOfTheCpu) {
  testing::HostDevice device;
  for (size_t numel : {1U, 255U, 256U, 257U, 2048U, 5000U}) {
    for (bool special : {false, true}) {
      std::vector<float> values = valuesOf(numel, static_cast<unsigned>(numel), special);
      const auto nbytes = static_cast<size_t>(encodedNbytes(GetParam(), static_cast<int64_t>(numel)));
      std::vector<uint8_t> expected(nbytes);
      std::vector<uint8_t> got(nbytes + 2, 0xcd);
      const size_t overflows = encode(GetParam(), expected.data(), DType::Float32, values.data(), numel);
      unsigned long long counted = 5;
      device.encode({GetParam(), numel, 1, values.data(), got.data(), &counted}, nullptr);
      EXPECT_EQ(counted, 5 + overflows);
      EXPECT_EQ(std::memcmp(got.data(), expected.data(), nbytes), 0) << numel;
      EXPECT_EQ(got[nbytes], 0xcd) << "wrote beyond its end";
      std::vector<float> decoded(numel);
      std::vector<float> back(numel);
      decode(GetParam(), DType::Float32, decoded.data(), expected.data(), numel);
      device.decode({GetParam(), numel, 1, back.data(), got.data(), nullptr}, nullptr);
      EXPECT_EQ(std::memcmp(back.data(), decoded.data(), numel * sizeof(float)), 0) << numel;
    }
  }
}

TEST_P(CodecKernel, EncodesEachPartFromItsOwnBeginning) {
  testing::HostDevice device;
  constexpr size_t kPart = 1001; // odd: blocks of bytes begin at odd places
  constexpr size_t kParts = 3;
  std::vector<float> values = valuesOf(kPart * kParts, 7, true);
  const auto nbytes = static_cast<size_t>(encodedNbytes(GetParam(), kPart));
  std::vector<uint8_t> expected(nbytes * kParts);
  std::vector<uint8_t> got(nbytes * kParts);
  for (size_t part = 0; part < kParts; ++part) {
    static_cast<void>(
        encode(GetParam(), expected.data() + part * nbytes, DType::Float32, values.data() + part * kPart, kPart));
  }
  device.encode({GetParam(), kPart, kParts, values.data(), got.data(), nullptr}, nullptr);
  EXPECT_EQ(got, expected);
}

TEST_P(CodecKernel, FindsBlocksIn64Bits) {
  const uint64_t numel = (uint64_t{5} << 32) + 77;
  CodecArgs args;
  args.codec = GetParam();
  args.numel = numel;
  args.parts = 2;
  const uint64_t blocks = blocksOfPart(numel);
  const auto part = static_cast<uint64_t>(encodedNbytes(GetParam(), static_cast<int64_t>(numel)));
  const CodecBlock last = blockAt(args, 2 * blocks - 1);
  EXPECT_EQ(last.count, 77);
  EXPECT_EQ(last.value, 2 * numel - 77);
  EXPECT_EQ(last.byte, part + static_cast<uint64_t>(encodedNbytes(GetParam(), static_cast<int64_t>(numel - 77))));
  EXPECT_EQ(blockAt(args, blocks).byte, part);
}

INSTANTIATE_TEST_SUITE_P(
    Codecs,
    CodecKernel,
    ::testing::Values(Codec::BFloat16, Codec::Float16, Codec::Int8),
    [](const auto& each) { return std::string(codecName(each.param)); });

} // namespace
} // namespace pycomm::cuda
