// Scratch is a pipeline's, and does not grow with the tensor or with the group.
#include <gtest/gtest.h>

#include <cstdint>

#include "schedule/group_run.h"
#include "schedule/make_schedule.h"

namespace pycomm {
namespace {

int64_t scratchNbytes(const ScheduleRequest& request) {
  const Schedule schedule = makeSchedule(request);
  int64_t nbytes = 0;
  for (size_t k = 0; k < schedule.scratch_numel.size(); ++k) {
    nbytes += schedule.scratch_numel[k] * static_cast<int64_t>(elementSize(schedule.scratch_dtype[k]));
  }
  return nbytes;
}

ScheduleRequest sumOf(Collective kind, int32_t size, int64_t numel, ReduceOp op) {
  ScheduleRequest request;
  request.kind = kind;
  request.size = size;
  request.rank = size / 2;
  request.root = kind == Collective::Reduce ? size / 2 : -1;
  request.numel = kind == Collective::ReduceScatter ? numel / size : numel;
  request.dtype = DType::Float32;
  request.reduce_op = op;
  return request;
}

TEST(Scratch, OfAPremulSumHoldsAPipeline) {
  for (const Collective kind : {Collective::AllReduce, Collective::Reduce, Collective::ReduceScatter}) {
    for (const int32_t size : {2, 3, 8}) {
      EXPECT_LE(scratchNbytes(sumOf(kind, size, 256 << 20, ReduceOp::PremulSum)), 8 << 20)
          << collectiveName(kind) << " of 1 GiB, " << size << " ranks";
    }
  }
}

TEST(Scratch, OfSmallTensorsIsNotLarger) {
  EXPECT_LE(scratchNbytes(sumOf(Collective::AllReduce, 2, 100, ReduceOp::PremulSum)), 400);
}

TEST(Scratch, OfDirectSumsIsBoundedForAnyNumberOfRanks) {
  for (const Collective kind : {Collective::AllReduce, Collective::ReduceScatter}) {
    for (const int32_t size : {4, 16, 64, 512}) {
      ScheduleRequest request = sumOf(kind, size, 64 << 20, ReduceOp::Sum);
      request.algorithm = Algorithm::Direct;
      request.dtype = DType::BFloat16;
      EXPECT_LE(scratchNbytes(request), 16 << 20) << collectiveName(kind) << " " << size << " ranks";
      request.dtype = DType::Float32;
      request.codec = Codec::Int8;
      EXPECT_LE(scratchNbytes(request), 24 << 20) << collectiveName(kind) << " encoded, " << size << " ranks";
    }
  }
}

} // namespace
} // namespace pycomm
