#include "engine/data/local_steps.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"

namespace pycomm {
namespace {

using Values = std::vector<float>;

ConstBufferView partOf(const Values& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(float)};
}

BufferView partOf(Values& values) {
  return {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(float)};
}

/// An operation of float32 with one scratch buffer of four elements and these steps, which are never sent.
Operation::Request requestOf(std::vector<Step> steps, std::vector<Region> sources = {}) {
  Schedule schedule;
  schedule.dtype = DType::Float32;
  schedule.size = 2;
  schedule.steps = std::move(steps);
  schedule.sources = std::move(sources);
  schedule.scratch_numel = {4};
  schedule.scratch_dtype = {DType::Float32};
  Operation::Request request;
  request.descriptor.dtype = DType::Float32;
  request.schedule = prepare(std::move(schedule));
  return request;
}

Step stepOf(StepKind kind, Region src, Region dst) {
  Step step;
  step.kind = kind;
  step.src = src;
  step.dst = dst;
  return step;
}

struct LocalStepsTest : ::testing::Test {
  StagingMemory memory{1 << 20};
  StagingPool pool{memory};
};

TEST_F(LocalStepsTest, RegionsLieInTheOperationsMemoryAndInScratch) {
  const Values input = {1, 2, 3, 4};
  Values output(4);
  Operation::Request request = requestOf({});
  request.input = partOf(input);
  request.output = partOf(output);
  Operation operation(std::move(request));
  {
    const LocalSteps steps(operation, 2, pool);
    EXPECT_EQ(pool.takenNbytes(), 4 * sizeof(float));
    EXPECT_EQ(steps.at({Buffer::Input, 1, 2}), reinterpret_cast<const std::byte*>(&input[1]));
    EXPECT_EQ(steps.view({Buffer::Output, 2, 2}).ptr, reinterpret_cast<std::byte*>(&output[2]));
    EXPECT_EQ(steps.view({Buffer::Output, 2, 2}).nbytes, 2 * sizeof(float));
    EXPECT_EQ(steps.at({Buffer::Scratch0, 3, 1}) - steps.at({Buffer::Scratch0, 0, 1}), 12);
    EXPECT_EQ(steps.at({Buffer::None, 0, 0}), nullptr);
  }
  EXPECT_EQ(pool.takenNbytes(), 0U);
}

TEST_F(LocalStepsTest, PartsOfOtherRanksHaveBuffersOfTheirOwn) {
  const Values first = {1, 2, 3};
  const Values none;
  const Values last = {4, 5};
  Operation::Request request = requestOf({});
  request.extras().input_parts = {partOf(first), partOf(none), partOf(last)};
  Operation operation(std::move(request));
  const LocalSteps steps(operation, 3, pool);
  EXPECT_EQ(steps.at({Buffer::Input, 2, 1}), reinterpret_cast<const std::byte*>(&first[2]));
  EXPECT_EQ(steps.at({Buffer::Input, 3, 2}), reinterpret_cast<const std::byte*>(&last[0]));
  EXPECT_EQ(steps.at({Buffer::Input, 5, 0}), nullptr) << "an empty region may lie nowhere";
  try {
    static_cast<void>(steps.at({Buffer::Input, 2, 2}));
    ADD_FAILURE() << "reaches from one part into the next";
  } catch (const Error& error) {
    EXPECT_EQ(error.record().code, ErrorCode::Internal);
    EXPECT_NE(std::string(error.what()).find("into another's"), std::string::npos) << error.what();
  }
}

TEST_F(LocalStepsTest, StepsThatMoveNothingBetweenRanks) {
  const Values input = {1, 2, 3, 4};
  Values output(4);
  Step sum = stepOf(StepKind::ReduceMany, {}, {Buffer::Output, 0, 2});
  sum.sources_end = 2;
  sum.final = true;
  const std::vector<Step> of = {
      stepOf(StepKind::Scale, {Buffer::Input, 0, 4}, {Buffer::Scratch0, 0, 4}),
      sum,
      stepOf(StepKind::Copy, {Buffer::Scratch0, 2, 2}, {Buffer::Output, 2, 2}),
      stepOf(StepKind::Copy, {Buffer::Output, 2, 2}, {Buffer::Output, 1, 2}), // overlaps
  };
  Operation::Request request = requestOf(of, {{Buffer::Input, 0, 2}, {Buffer::Scratch0, 0, 2}});
  request.descriptor.reduce_op = ReduceOp::Avg;
  request.extras().premul_factor = 3;
  request.input = partOf(input);
  request.output = partOf(output);
  Operation operation(std::move(request));
  const LocalSteps steps(operation, 2, pool);
  for (const Step& step : of) {
    steps.run(step, {0, steps.valuesOf(step, nullptr)}, nullptr);
  }
  EXPECT_EQ(output, (Values{2, 9, 12, 12})); // (1 + 3) / 2, then what the last copy has moved
}

TEST_F(LocalStepsTest, AnAverageIsDividedOnlyWhenItIsFinal) {
  const Values input = {0};
  Values output(1);
  Step step = stepOf(StepKind::RecvReduce, {Buffer::Input, 0, 1}, {Buffer::Output, 0, 1});
  Operation::Request request = requestOf({});
  request.descriptor.reduce_op = ReduceOp::Avg;
  request.input = partOf(input);
  request.output = partOf(output);
  Operation operation(std::move(request));
  const LocalSteps steps(operation, 2, pool);
  Values four = {4};
  steps.run(step, {0, 1}, partOf(four).ptr);
  EXPECT_EQ(output[0], 4);
  step.final = true;
  steps.run(step, {0, 1}, partOf(four).ptr);
  EXPECT_EQ(output[0], 2);
}

} // namespace
} // namespace pycomm
