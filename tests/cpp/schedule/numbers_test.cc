// The order of operands, roundings, averages, factors and encoding, bit by bit against sums written out here.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "group_run.h"
#include "proof/schedule/scalar_math.h"

namespace pycomm::testing {
namespace {

ScheduleRequest allReduce(Algorithm algorithm, int32_t size, int64_t numel, DType dtype, ReduceOp op) {
  ScheduleRequest request;
  request.kind = Collective::AllReduce;
  request.algorithm = algorithm;
  request.size = size;
  request.numel = numel;
  request.dtype = dtype;
  request.reduce_op = op;
  request.segment_nbytes = 64;
  return request;
}

/// Floats whose sum depends on the order in which they are added.
std::vector<std::vector<float>> unevenFloats(int32_t size, int64_t numel) {
  std::mt19937 random(7);
  std::vector<std::vector<float>> inputs(static_cast<size_t>(size));
  for (auto& input : inputs) {
    for (int64_t i = 0; i < numel; ++i) {
      const double value = static_cast<double>(random()) / 4294967296.0 - 0.4;
      input.push_back(static_cast<float>(std::ldexp(value, static_cast<int>(random() % 12))));
    }
  }
  return inputs;
}

template <typename T>
void expectSameBits(const std::vector<std::vector<T>>& outputs) {
  for (const auto& output : outputs) {
    ASSERT_EQ(toBytes(output), toBytes(outputs.front()));
  }
}

RunOptions withOp(ReduceOp op) {
  RunOptions options;
  options.op = op;
  options.window_frames = 4;
  return options;
}

uint16_t toHalf(float value) {
  uint16_t bits;
  castElements(
      DType::Float16, reinterpret_cast<std::byte*>(&bits), DType::Float32, reinterpret_cast<std::byte*>(&value), 1);
  return bits;
}
float fromHalf(uint16_t bits) {
  float value;
  castElements(
      DType::Float32, reinterpret_cast<std::byte*>(&value), DType::Float16, reinterpret_cast<std::byte*>(&bits), 1);
  return value;
}

TEST(ScalarMath, HalfKnowsItsLandmarks) {
  EXPECT_EQ(fromHalf(0x3c00), 1.0F);
  EXPECT_EQ(fromHalf(0xc000), -2.0F);
  EXPECT_EQ(fromHalf(0x7bff), 65504.0F);
  EXPECT_EQ(fromHalf(0x0400), 0x1p-14F);
  EXPECT_EQ(fromHalf(0x0001), 0x1p-24F);
  EXPECT_TRUE(std::isinf(fromHalf(0x7c00)));
  EXPECT_TRUE(std::isnan(fromHalf(0x7e00)));
  EXPECT_EQ(toHalf(-0.0F), 0x8000);
  EXPECT_EQ(toHalf(65519.9F), 0x7bff);
  EXPECT_EQ(toHalf(65520.0F), 0x7c00);
}

TEST(ScalarMath, HalfRoundsToNearestEvenBetweenAllNeighbours) {
  for (uint16_t bits = 0; bits < 0x7bff; ++bits) {
    const auto next = static_cast<uint16_t>(bits + 1);
    const float low = fromHalf(bits);
    const float high = fromHalf(next);
    ASSERT_LT(low, high);
    const float middle = (low + high) / 2; // exact: one bit more than a half has
    const float infinity = std::numeric_limits<float>::infinity();
    ASSERT_EQ(toHalf(low), bits);
    ASSERT_EQ(toHalf(middle), bits % 2 == 0 ? bits : next) << bits;
    ASSERT_EQ(toHalf(std::nextafter(middle, -infinity)), bits) << bits;
    ASSERT_EQ(toHalf(-std::nextafter(middle, infinity)), 0x8000 | next) << bits;
  }
}

TEST(Bits, AreTheSameOnAllRanks) {
  for (const int32_t size : {2, 3, 4, 5, 7, 8, 12, 16, 23}) {
    for (const auto algorithm : {Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::Direct}) {
      for (const auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product}) {
        const auto request = allReduce(algorithm, size, 53, DType::Float32, op);
        const auto outputs = runGroup(forAllRanks(request), unevenFloats(size, 53), withOp(op));
        SCOPED_TRACE(label(request, withOp(op)));
        ASSERT_NO_FATAL_FAILURE(expectSameBits(outputs));
      }
    }
  }
}

TEST(Order, TheRingFoldsFromTheRankAfterTheOwner) {
  const int32_t size = 5;
  const auto inputs = unevenFloats(size, size);
  const auto requests = forAllRanks(allReduce(Algorithm::Ring, size, size, DType::Float32, ReduceOp::Sum));
  const auto outputs = runGroup(requests, inputs, withOp(ReduceOp::Sum));
  for (size_t owner = 0; owner < 5; ++owner) { // one element per chunk
    float sum = inputs[(owner + 1) % 5][owner];
    for (size_t k = 2; k <= 5; ++k) {
      sum += inputs[(owner + k) % 5][owner];
    }
    EXPECT_EQ(outputs[0][owner], sum) << owner;
  }
}

TEST(Order, RecursiveDoublingIsATreeOverConsecutiveRanks) {
  const auto inputs = unevenFloats(6, 9); // members: {0, 1}, {2, 3}, 4, 5
  const auto outputs = runGroup(
      forAllRanks(allReduce(Algorithm::RecursiveDoubling, 6, 9, DType::Float32, ReduceOp::Sum)),
      inputs,
      withOp(ReduceOp::Sum));
  for (size_t i = 0; i < 9; ++i) {
    const auto x = [&](size_t rank) { return inputs[rank][i]; };
    EXPECT_EQ(outputs[3][i], ((x(0) + x(1)) + (x(2) + x(3))) + (x(4) + x(5)));
  }
}

TEST(Order, RecursiveHalvingFoldsTheFarthestFirst) {
  const auto inputs = unevenFloats(4, 4); // one element per rank
  auto request = allReduce(Algorithm::RecursiveHalving, 4, 1, DType::Float32, ReduceOp::Sum);
  request.kind = Collective::ReduceScatter;
  const auto outputs = runGroup(forAllRanks(request), inputs, withOp(ReduceOp::Sum));
  for (size_t owner = 0; owner < 4; ++owner) {
    const auto x = [&](size_t rank) { return inputs[rank][owner]; };
    EXPECT_EQ(outputs[owner][0], (x(0) + x(2)) + (x(1) + x(3))) << owner;
  }
}

TEST(Order, DirectReduceScatterRoundsOnce) {
  // 2048 + 1 rounds to 2048 in half precision, so only a wider accumulator finds 2050.
  std::vector<std::vector<uint16_t>> inputs;
  for (int32_t rank = 0; rank < 3; ++rank) {
    inputs.emplace_back(3, toHalf(rank == 0 ? 2048.0F : 1.0F));
  }
  auto request = allReduce(Algorithm::Direct, 3, 1, DType::Float16, ReduceOp::Sum);
  request.kind = Collective::ReduceScatter;
  const auto outputs = runGroup(forAllRanks(request), inputs, withOp(ReduceOp::Sum));
  for (const auto& output : outputs) {
    EXPECT_EQ(output[0], toHalf(2050.0F));
  }
}

// Of two NaNs the first operand's payload survives, so the order of operands shows: it is the lower rank's.
TEST(Order, TheLowerRankComesFirst) {
  const auto nanWith = [](uint32_t payload) {
    const uint32_t bits = 0x7fc00000U | payload;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  };
  for (const int32_t size : {2, 3, 4, 6, 7}) {
    for (const auto algorithm : {Algorithm::RecursiveDoubling, Algorithm::Direct, Algorithm::Ring}) {
      std::vector<std::vector<float>> inputs;
      for (int32_t rank = 0; rank < size; ++rank) {
        inputs.emplace_back(static_cast<size_t>(size), nanWith(static_cast<uint32_t>(rank) + 1));
      }
      const auto requests = forAllRanks(allReduce(algorithm, size, size, DType::Float32, ReduceOp::Min));
      const auto outputs = runGroup(requests, inputs, withOp(ReduceOp::Min));
      for (const auto& output : outputs) {
        for (const float value : output) { // in the ring rank 0 comes first where the ring wraps, that is, always
          uint32_t bits;
          std::memcpy(&bits, &value, sizeof bits);
          EXPECT_EQ(bits, 0x7fc00001U) << algorithmName(algorithm) << " size " << size;
        }
      }
    }
  }
}

TEST(Average, DividesOnceInTheAccumulationType) {
  // 3 halves whose float32 sum and its third are exact, while a sum rounded to half first would give another third.
  for (const auto algorithm : {Algorithm::RecursiveDoubling, Algorithm::Direct}) {
    const std::vector<std::vector<uint16_t>> inputs = {{toHalf(2048.0F)}, {toHalf(1.0F)}, {toHalf(1.0F)}};
    auto request = allReduce(algorithm, 3, 1, DType::Float16, ReduceOp::Avg);
    const auto outputs = runGroup(forAllRanks(request), inputs, withOp(ReduceOp::Avg));
    expectSameBits(outputs);
    const float folded = algorithm == Algorithm::Direct ? 2050.0F : fromHalf(toHalf(2049.0F)) + 1.0F;
    EXPECT_EQ(outputs[0][0], toHalf(folded / 3.0F)) << algorithmName(algorithm);
  }
}

TEST(Average, IsTheSumDividedByTheSize) {
  const std::pair<Collective, Algorithm> forms[] = {
      {Collective::AllReduce, Algorithm::Ring},
      {Collective::AllReduce, Algorithm::RecursiveDoubling},
      {Collective::AllReduce, Algorithm::Direct},
      {Collective::Reduce, Algorithm::BinomialTree},
      {Collective::Reduce, Algorithm::Ring},
      {Collective::ReduceScatter, Algorithm::Ring},
      {Collective::ReduceScatter, Algorithm::RecursiveHalving},
      {Collective::ReduceScatter, Algorithm::Direct}};
  for (const int32_t size : {1, 2, 3, 6, 9}) {
    for (const auto& [kind, algorithm] : forms) {
      auto request = allReduce(algorithm, size, 7, DType::Float64, ReduceOp::Avg);
      request.kind = kind;
      request.root = 0;
      std::vector<std::vector<double>> inputs;
      for (int32_t rank = 0; rank < size; ++rank) {
        request.rank = rank;
        inputs.emplace_back(static_cast<size_t>(inputNumel(request)), rank + 1.0);
      }
      const auto outputs = runGroup(forAllRanks(request), inputs, withOp(ReduceOp::Avg));
      ASSERT_EQ(outputs[0].size(), 7U);
      for (const double value : outputs[0]) {
        EXPECT_EQ(value, size * (size + 1.0) / 2 / size) << collectiveName(kind) << " " << algorithmName(algorithm);
      }
    }
  }
}

TEST(PremulSum, EveryRankHasItsOwnFactor) {
  for (const auto kind : {Collective::AllReduce, Collective::Reduce, Collective::ReduceScatter}) {
    for (const auto algorithm :
         {Algorithm::Auto,
          Algorithm::Ring,
          Algorithm::RecursiveDoubling,
          Algorithm::RecursiveHalving,
          Algorithm::Direct,
          Algorithm::BinomialTree}) {
      for (const bool in_place : {false, true}) {
        auto request = allReduce(algorithm, 5, 23, DType::Float64, ReduceOp::PremulSum);
        request.kind = kind;
        request.root = 3;
        RunOptions options = withOp(ReduceOp::PremulSum);
        options.in_place = in_place;
        options.premul_factors = {0.5, 2, 4, 0, -1};
        std::vector<std::vector<double>> inputs;
        for (int32_t rank = 0; rank < 5; ++rank) {
          request.rank = rank;
          inputs.emplace_back(static_cast<size_t>(inputNumel(request)), 10.0 + rank);
        }
        std::vector<std::vector<double>> outputs;
        try {
          outputs = runGroup(forAllRanks(request), inputs, options);
        } catch (const Error& error) {
          ASSERT_EQ(error.record().code, ErrorCode::Unsupported) << error.what(); // not every pair exists
          continue;
        }
        for (const double value : outputs[3]) {
          EXPECT_EQ(value, 5.0 + 22 + 48 - 14) << collectiveName(kind) << " " << algorithmName(algorithm);
        }
      }
    }
  }
}

} // namespace
} // namespace pycomm::testing
