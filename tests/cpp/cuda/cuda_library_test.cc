// What the extension makes of libpycomm_cuda.so: which libraries it refuses, and CUDA's answers as errors.
#include "device/cuda_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "device/fused_bucket.h"

namespace pycomm::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <class Body>
ErrorRecord failureOf(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.record();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

TEST(CudaLibrary, ATableOfAnotherVersionIsRefusedWithBothVersions) {
  CudaTable table = *pycomm_cuda_table();
  table.version = kPycommCudaVersion - 1;
  const ErrorRecord refused = failureOf([&] { static_cast<void>(runtimeOf(table, "/old/libpycomm_cuda.so")); });
  EXPECT_EQ(refused.code, ErrorCode::Unsupported);
  EXPECT_THAT(
      refused.summary,
      AllOf(
          HasSubstr("/old/libpycomm_cuda.so"),
          HasSubstr("version " + std::to_string(kPycommCudaVersion - 1)),
          HasSubstr("this extension's " + std::to_string(kPycommCudaVersion))));
  EXPECT_THAT(refused.hint, HasSubstr("PYCOMM_BUILD_CUDA=1"));
  table.version = kPycommCudaVersion;
  table.nbytes += 8;
  EXPECT_THROW(static_cast<void>(runtimeOf(table, "/old/libpycomm_cuda.so")), Error);
}

TEST(CudaLibrary, AFileThatIsNoneIsNamedWithTheLoadersWords) {
  EXPECT_THAT(
      failureOf([] { static_cast<void>(cudaLibrary("/nowhere/libpycomm_cuda.so")); }).summary,
      AllOf(HasSubstr("/nowhere/libpycomm_cuda.so"), HasSubstr("could not be loaded"), HasSubstr("No such file")));
  EXPECT_THAT(
      failureOf([] { static_cast<void>(cudaLibrary("libc.so.6")); }).summary,
      HasSubstr("libc.so.6, which is no library of pycomm's: it has no pycomm_cuda_table"));
}

TEST(CudaLibrary, RunningOutOfMemoryHasACodeAndAHintOfItsOwn) {
  CudaTable table = *pycomm_cuda_table();
  table.allocate_pinned = [](size_t, void**) { return kCudaOutOfMemory; };
  table.create_event = [](void**) { return 1; };
  const auto runtime = runtimeOf(table, "a table");
  const ErrorRecord full = failureOf([&] { static_cast<void>(runtime->allocatePinned(1)); });
  EXPECT_EQ(full.code, ErrorCode::OutOfMemory);
  EXPECT_EQ(full.summary, "CUDA: cudaHostAlloc failed.");
  EXPECT_EQ(full.cause, "cudaErrorMemoryAllocation (of the fake device)");
  EXPECT_THAT(full.hint, HasSubstr("empty_cache"));
  const ErrorRecord broken = failureOf([&] { static_cast<void>(runtime->createEvent()); });
  EXPECT_EQ(broken.code, ErrorCode::SystemError);
  EXPECT_EQ(broken.cause, "cudaErrorInvalidValue (of the fake device)");
  EXPECT_THAT(broken.hint, HasSubstr("CUDA_LAUNCH_BLOCKING=1"));
}

TEST(CudaLibrary, KernelsThatThereAreNotAreRefusedBeforeTheyTouchAnything) {
  const auto runtime = runtimeOf(*pycomm_cuda_table(), "the fake library");
  int32_t gradient = 0; // of the host: a launch would be refused for it
  const Gradient gradients[] = {{&gradient, 1}};
  const ErrorRecord pair = failureOf([&] {
    const FusedBucket plan = planFusedBucket(gradients, 1, DType::Int32);
    packBucket(*runtime, plan, DType::Int32, DType::Float16, &gradient, 1.0F, nullptr, nullptr);
  });
  EXPECT_EQ(pair.code, ErrorCode::Unsupported);
  EXPECT_EQ(pair.summary, "there is no kernel that packs int32 gradients as float16.");
  const ErrorRecord back = failureOf([&] {
    const FusedBucket plan = planFusedBucket(gradients, 1, DType::Int32);
    unpackBucket(*runtime, plan, DType::Int32, DType::Float16, &gradient, 1.0F, nullptr);
  });
  EXPECT_EQ(back.summary, pair.summary);
  EXPECT_TRUE(runtime->hasReduce(DType::Int32, ReduceOp::Sum));
  EXPECT_FALSE(runtime->hasReduce(DType::Int32, ReduceOp::Band));
  const ErrorRecord op = failureOf([&] { checkReduce(*runtime, DType::Int32, ReduceOp::Band, 2); });
  EXPECT_EQ(op.summary, "the device's reduce kernel has no BAND.");
  const ErrorRecord dtype = failureOf([&] { checkReduce(*runtime, DType::UInt32, ReduceOp::Sum, 2); });
  EXPECT_EQ(dtype.summary, "the device's reduce kernel has no uint32.");
  EXPECT_EQ(failureOf([&] { checkReduce(*runtime, DType::Int32, ReduceOp::Avg, 2); }).code, ErrorCode::InvalidArgument);
  CodecArgs unknown;
  unknown.codec = static_cast<Codec>(9); // of a newer extension
  const ErrorRecord codec = failureOf([&] { runtime->encode(unknown, nullptr); });
  EXPECT_EQ(codec.code, ErrorCode::Unsupported);
  EXPECT_EQ(codec.summary, "pycomm's CUDA library has no kernel for the launch of the encode kernel.");
  EXPECT_EQ(failureOf([&] { runtime->decode(unknown, nullptr); }).code, ErrorCode::Unsupported);
}

} // namespace
} // namespace pycomm::cuda
