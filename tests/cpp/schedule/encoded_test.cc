// Encoded all_reduce and reduce_scatter for 1 to 64 ranks, against d(e(sum of d(e(x)))) written out here; and the interpreter's
// codecs against those of numeric/.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "group_run.h"
#include "numeric/codec.h"
#include "proof/schedule/scalar_codec.h"
#include "schedule/select.h"

namespace pycomm::testing {
namespace {

const std::vector<Codec> kCodecs = {Codec::BFloat16, Codec::Float16, Codec::Int8};
using Floats = std::vector<float>;

ScheduleRequest encodedRequest(Collective kind, Codec codec, int32_t size, int64_t numel, ReduceOp op) {
  ScheduleRequest request;
  request.kind = kind;
  request.size = size;
  request.numel = numel;
  request.dtype = DType::Float32;
  request.codec = codec;
  request.reduce_op = op;
  request.segment_nbytes = 600; // one block of fp16, two of int8
  return request;
}

std::vector<Floats> gaussians(const std::vector<ScheduleRequest>& requests) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<Floats> inputs;
  for (const auto& request : requests) {
    Floats values(static_cast<size_t>(inputNumel(request)));
    for (float& value : values) {
      value = std::ldexp(normal(random), static_cast<int>(random() % 8));
    }
    inputs.push_back(values);
  }
  return inputs;
}

Floats throughCodec(Codec codec, const Floats& values) {
  std::vector<std::byte> bytes(static_cast<size_t>(encodedNbytes(codec, static_cast<int64_t>(values.size()))));
  static_cast<void>(encode(codec, bytes.data(), DType::Float32, values.data(), values.size()));
  Floats back(values.size());
  decode(codec, DType::Float32, back.data(), bytes.data(), values.size());
  return back;
}

Floats fold(Codec codec, const std::vector<Floats>& rows, int64_t divisor) {
  Floats sum(rows.front().size());
  for (size_t k = 0; k < rows.size(); ++k) {
    const Floats back = throughCodec(codec, rows[k]);
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] = k == 0 ? back[i] : sum[i] + back[i];
    }
  }
  for (float& value : sum) {
    value /= static_cast<float>(divisor);
  }
  return sum;
}

RunOptions withOp(ReduceOp op, bool in_place) {
  RunOptions options;
  options.op = op;
  options.in_place = in_place;
  return options;
}

TEST(Encoded, AllReduceIsTheCodecOfTheSumOnEveryRankForOneTo64Ranks) {
  for (const int32_t size : allSizes()) {
    for (const int64_t numel :
         {int64_t{0}, int64_t{1}, int64_t{255}, int64_t{257}, int64_t{256} * size + 300, int64_t{5000}}) {
      if (size > 16 && numel > 5000 && (size + numel) % 7 != 0) {
        continue; // the larger groups take most of the time
      }
      const Codec codec = kCodecs[static_cast<size_t>(size + numel) % kCodecs.size()];
      const ReduceOp op = numel % 2 == 0 ? ReduceOp::Avg : ReduceOp::Sum;
      const auto requests = forAllRanks(encodedRequest(Collective::AllReduce, codec, size, numel, op));
      const auto inputs = gaussians(requests);
      const auto options = withOp(op, size % 3 == 0);
      SCOPED_TRACE(label(requests[0], options) + " " + codecName(codec));
      const auto outputs = runGroup(requests, inputs, options);
      Floats wanted = inputs[0];
      if (size > 1) { // alone there is nothing to send, and nothing is rounded
        wanted = throughCodec(codec, fold(codec, inputs, op == ReduceOp::Avg ? size : 1));
      }
      for (const auto& output : outputs) {
        ASSERT_EQ(toBytes(output), toBytes(wanted));
      }
    }
  }
}

TEST(Encoded, ReduceScatterIsTheSumOfDecodedInputs) {
  for (const int32_t size : {2, 3, 5, 8, 17, 64}) {
    for (const Codec codec : kCodecs) {
      for (const bool uneven : {false, true}) {
        auto request = encodedRequest(Collective::ReduceScatter, codec, size, uneven ? 0 : 700, ReduceOp::Avg);
        for (int32_t rank = 0; uneven && rank < size; ++rank) {
          request.counts.push_back(rank == 1 ? 0 : rank * 37 % 900);
        }
        const auto requests = forAllRanks(request);
        const auto inputs = gaussians(requests);
        const auto options = withOp(ReduceOp::Avg, !uneven && size % 2 == 0);
        SCOPED_TRACE(label(request, options) + " " + codecName(codec));
        const auto outputs = runGroup(requests, inputs, options);
        int64_t offset = 0;
        for (size_t rank = 0; rank < outputs.size(); ++rank) {
          std::vector<Floats> rows;
          const auto numel = static_cast<int64_t>(outputs[rank].size());
          for (const Floats& input : inputs) {
            rows.emplace_back(input.begin() + offset, input.begin() + offset + numel);
          }
          ASSERT_EQ(toBytes(outputs[rank]), toBytes(fold(codec, rows, size))) << rank;
          offset += numel;
        }
      }
    }
  }
}

TEST(Encoded, PremulSumScalesBeforeItEncodes) {
  const auto requests =
      forAllRanks(encodedRequest(Collective::ReduceScatter, Codec::Int8, 4, 300, ReduceOp::PremulSum));
  const auto inputs = gaussians(requests);
  auto options = withOp(ReduceOp::PremulSum, false);
  options.premul_factors = {0.5, 0.3, 2.0, 0.25};
  const auto outputs = runGroup(requests, inputs, options);
  std::vector<Floats> rows;
  for (size_t rank = 0; rank < 4; ++rank) {
    rows.emplace_back(inputs[rank].begin(), inputs[rank].begin() + 300);
    for (float& value : rows.back()) {
      value *= static_cast<float>(options.premul_factors[rank]);
    }
  }
  EXPECT_EQ(toBytes(outputs[0]), toBytes(fold(Codec::Int8, rows, 1)));
}

TEST(Encoded, TheErrorDoesNotGrowWithTheNumberOfRanks) {
  for (const int32_t size : {2, 8, 64}) {
    const auto requests = forAllRanks(encodedRequest(Collective::AllReduce, Codec::Int8, size, 2048, ReduceOp::Avg));
    std::vector<Floats> inputs(static_cast<size_t>(size), Floats(2048));
    for (size_t i = 0; i < 2048; ++i) { // the same on every rank, so that roundings do not average out
      const auto value = static_cast<float>(std::sin(static_cast<double>(i)));
      for (auto& input : inputs) {
        input[i] = value;
      }
    }
    const auto outputs = runGroup(requests, inputs, withOp(ReduceOp::Avg, false));
    for (size_t i = 0; i < 2048; ++i) {
      ASSERT_LE(std::fabs(outputs[0][i] - inputs[0][i]), 2 * 1.02 / 250)
          << size; // one rounding as input, one as result
    }
  }
}

TEST(Encoded, TheInterpretersCodecsAgreeWithNumericsToTheBit) {
  std::mt19937 random(11);
  for (const Codec codec : kCodecs) {
    for (int round = 0; round < 60; ++round) {
      Floats values(1 + random() % 600);
      for (float& value : values) {
        const auto bits = static_cast<uint32_t>(random());
        const uint32_t near =
            0x3f000000U + bits % 0x01000000U; // around 1, or any pattern at all: NaN, infinity, denormal
        const uint32_t pattern =
            round % 3 == 0 ? bits : (round % 3 == 1 ? near | (bits & 0x80000000U) : bits % 0x02000000U);
        std::memcpy(&value, &pattern, sizeof value);
      }
      const auto nbytes = static_cast<size_t>(encodedNbytes(codec, static_cast<int64_t>(values.size())));
      std::vector<std::byte> mine(nbytes);
      std::vector<std::byte> theirs(nbytes);
      static_cast<void>(encode(codec, mine.data(), DType::Float32, values.data(), values.size()));
      const auto bytes = toBytes(values);
      encodeElements(codec, theirs.data(), DType::Float32, bytes.data(), values.size());
      ASSERT_EQ(mine, theirs) << codecName(codec) << round;
      Floats back(values.size());
      decode(codec, DType::Float32, back.data(), mine.data(), values.size());
      auto their_back = bytes;
      decodeElements(codec, DType::Float32, their_back.data(), mine.data(), values.size());
      ASSERT_EQ(toBytes(back), their_back) << codecName(codec) << round;
    }
  }
}

TEST(Encoded, RefusesWhatHasNoMeaning) {
  const auto good = encodedRequest(Collective::AllReduce, Codec::Int8, 3, 100, ReduceOp::Sum);
  EXPECT_NO_THROW(static_cast<void>(makeSchedule(good)));
  auto bad = good;
  bad.reduce_op = ReduceOp::Max;
  EXPECT_THROW(static_cast<void>(makeSchedule(bad)), Error);
  bad = good;
  bad.dtype = DType::Int32;
  EXPECT_THROW(static_cast<void>(makeSchedule(bad)), Error);
  bad = good;
  bad.kind = Collective::AllGather;
  EXPECT_THROW(static_cast<void>(makeSchedule(bad)), Error);
  bad = good;
  bad.algorithm = Algorithm::Ring;
  EXPECT_THROW(static_cast<void>(makeSchedule(bad)), Error);
  bad = good;
  bad.codec = static_cast<Codec>(77);
  EXPECT_THROW(static_cast<void>(makeSchedule(bad)), Error);
}

// Nothing travels in a group of one, so its sums are exact, and a residual has to be added to them.
TEST(EncodedRequests, AGroupOfOneEncodesNothing) {
  for (const Collective kind : {Collective::AllReduce, Collective::ReduceScatter}) {
    EXPECT_EQ(codecFor(encodedRequest(kind, Codec::None, 2, 1 << 20, ReduceOp::Sum), Codec::Int8), Codec::Int8);
    EXPECT_EQ(codecFor(encodedRequest(kind, Codec::None, 1, 1 << 20, ReduceOp::Sum), Codec::Int8), Codec::None);
  }
}

} // namespace
} // namespace pycomm::testing
