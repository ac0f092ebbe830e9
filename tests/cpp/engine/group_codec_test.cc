// Encoded sums over real sockets: the numbers, what is counted, and ranks with different codecs.
#include "numeric/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ranks.h"

namespace pycomm::testing {
namespace {

constexpr size_t kEncodedNumel = 100'003;

std::vector<float> valuesOf(int rank) {
  std::vector<float> values(kEncodedNumel);
  for (size_t i = 0; i < kEncodedNumel; ++i) {
    values[i] = static_cast<float>(std::sin(static_cast<double>(i) * (1.0 + rank)) * 1e-6);
  }
  return values;
}

std::vector<float> throughCodec(Codec codec, const std::vector<float>& values) {
  std::vector<std::byte> bytes(static_cast<size_t>(encodedNbytes(codec, static_cast<int64_t>(values.size()))));
  static_cast<void>(encode(codec, bytes.data(), DType::Float32, values.data(), values.size()));
  std::vector<float> back(values.size());
  decode(codec, DType::Float32, back.data(), bytes.data(), back.size());
  return back;
}

std::vector<float> expectedSum(Codec codec, int size) {
  std::vector<float> sum = throughCodec(codec, valuesOf(0));
  for (int rank = 1; rank < size; ++rank) {
    const std::vector<float> row = throughCodec(codec, valuesOf(rank));
    for (size_t i = 0; i < kEncodedNumel; ++i) {
      sum[i] += row[i];
    }
  }
  return throughCodec(codec, sum);
}

Group::Call encodedCall(std::vector<float>& values, Codec codec) {
  Group::Call call = allReduceCall(values);
  call.schedule.codec = codec;
  call.schedule.segment_nbytes = 8 << 10; // several segments of each part
  return call;
}

class Encoded : public ::testing::TestWithParam<Codec> {};

TEST_P(Encoded, AllReduceGivesTheSameBitsOnAllRanksAndCountsWhatItSends) {
  const Codec codec = GetParam();
  for (const int size : {2, 3, 4}) {
    std::atomic<int64_t> numel{0};
    std::atomic<int64_t> nbytes{0};
    std::atomic<int64_t> saved{0};
    runRanks(size, [&](Rank& self) {
      std::vector<float> values = valuesOf(self.rank);
      const auto operation = self.group.start(encodedCall(values, codec));
      ASSERT_TRUE(operation->wait(Deadline::after(20000)));
      ASSERT_FALSE(operation->error());
      EXPECT_EQ(values, expectedSum(codec, self.size)) << self.rank;
      const CodecCounters& counters = self.group.codecCounters();
      numel += counters.sent_numel;
      nbytes += counters.sent_nbytes;
      saved += counters.saved_nbytes;
      EXPECT_EQ(counters.overflows, 0);
    });
    const int64_t times = 2 * (size - 1); // every value goes to its owner, and every sum to the others
    EXPECT_EQ(numel, times * static_cast<int64_t>(kEncodedNumel));
    EXPECT_EQ(nbytes, times * encodedNbytes(codec, kEncodedNumel));
    EXPECT_EQ(saved, 4 * numel - nbytes);
  }
}

TEST_P(Encoded, OverflowIsCountedAndInfinitiesPass) {
  const Codec codec = GetParam();
  std::atomic<int64_t> overflows{0};
  runRanks(2, [&](Rank& self) {
    std::vector<double> values(5000, 1.0);
    values[7] = 1e300; // beyond float32, on both ranks
    values[8] = self.rank == 0 ? -std::numeric_limits<double>::infinity() : 1.0;
    values[9] = self.rank == 1 ? std::numeric_limits<double>::quiet_NaN() : 1.0;
    std::vector<float> unused(values.size());
    Group::Call call = encodedCall(unused, codec);
    call.schedule.dtype = DType::Float64;
    call.input = call.output = viewOf(values);
    const auto operation = self.group.start(call);
    ASSERT_TRUE(operation->wait(Deadline::after(20000)));
    EXPECT_EQ(values[7], std::numeric_limits<double>::infinity());
    EXPECT_EQ(values[8], -std::numeric_limits<double>::infinity());
    EXPECT_TRUE(std::isnan(values[9]));
    EXPECT_NEAR(values[10], 2.0, 0.13);
    overflows += self.group.codecCounters().overflows;
  });
  EXPECT_EQ(overflows, 2);
}

INSTANTIATE_TEST_SUITE_P(
    Codecs,
    Encoded,
    ::testing::Values(Codec::BFloat16, Codec::Float16, Codec::Int8),
    [](const auto& tested) { return codecName(tested.param); });

TEST(EncodedMismatch, RanksWithDifferentCodecsAreToldBoth) {
  runRanks(2, [](Rank& self) {
    std::vector<float> values = valuesOf(self.rank);
    const auto operation = self.group.start(encodedCall(values, self.rank == 0 ? Codec::Int8 : Codec::Float16));
    ASSERT_TRUE(operation->wait(Deadline::after(20000)));
    ASSERT_TRUE(operation->error());
    EXPECT_EQ(operation->error()->code, ErrorCode::CollectiveMismatch);
    const std::string text = operation->error()->text();
    EXPECT_NE(text.find("wire int8"), std::string::npos) << text;
    EXPECT_NE(text.find("wire fp16"), std::string::npos) << text;
  });
}

} // namespace
} // namespace pycomm::testing
