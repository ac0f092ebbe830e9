// The library's own table and what uses it, on a device that is as strict as CUDA may be.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "device/cuda_library.h"
#include "device/stager.h"
#include "fake_cudart/device.h"

namespace pycomm::cuda {
namespace {

using ::testing::HasSubstr;

/// Floats on the device, which only kernels and copies can reach.
class DeviceFloats {
 public:
  explicit DeviceFloats(const std::vector<float>& values) : numel_(values.size()) {
    cudaMalloc(&ptr_, nbytes());
    std::memcpy(fake_cuda::kernelBytes(ptr_, nbytes()), values.data(), nbytes());
  }
  ~DeviceFloats() {
    cudaFree(ptr_);
  }
  DeviceFloats(const DeviceFloats&) = delete;
  DeviceFloats& operator=(const DeviceFloats&) = delete;

  [[nodiscard]] void* ptr() const {
    return ptr_;
  }
  [[nodiscard]] size_t nbytes() const {
    return numel_ * sizeof(float);
  }
  [[nodiscard]] std::vector<float> values() const {
    std::vector<float> read(numel_);
    std::memcpy(read.data(), fake_cuda::kernelBytes(ptr_, nbytes()), nbytes());
    return read;
  }

 private:
  void* ptr_ = nullptr;
  const size_t numel_;
};

class StrictDevice : public ::testing::Test {
 protected:
  const std::unique_ptr<DeviceRuntime> runtime = runtimeOf(*pycomm_cuda_table(), "the fake library");
  Stream const caller = fake_cuda::streamOf(0, 1);
  Stream const out = fake_cuda::streamOf(0, 2);
  Stream const in = fake_cuda::streamOf(0, 3);
};

TEST_F(StrictDevice, PointersThatItDidNotGiveOutAreRefused) {
  std::vector<float> on_host(4);
  const DeviceFloats on_device({1, 2, 3, 4});
  try {
    runtime->copy(on_device.ptr(), on_host.data(), on_device.nbytes(), out);
    FAIL() << "that copy would block";
  } catch (const Error& error) {
    EXPECT_THAT(error.record().cause, HasSubstr("not memory that this device gave out"));
  }
  EXPECT_THROW(runtime->copy(on_device.ptr(), on_device.ptr(), on_device.nbytes() + 1, out), Error);
}

TEST_F(StrictDevice, TheHostDiesWhereItTouchesDeviceMemory) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const DeviceFloats on_device({1});
  EXPECT_DEATH(static_cast<void>(*static_cast<volatile float*>(on_device.ptr())), "the host has touched device memory");
}

TEST_F(StrictDevice, TensorsGoToTheHostAndBackWhateverStreamRunsFirst) {
  Stager stager(*runtime, 0, out, in);
  for (int round = 0; round < 20; ++round) {
    std::vector<float> values(1000, static_cast<float>(round));
    const DeviceFloats first(values);
    const DeviceFloats second(values);
    auto* const block = static_cast<float*>(stager.take(2 * first.nbytes()));
    std::promise<void> there;
    stager.toHost(
        {{first.ptr(), block, first.nbytes()}, {second.ptr(), block + 1000, second.nbytes()}},
        caller,
        [&](size_t, const std::optional<ErrorRecord>& failure) {
          EXPECT_FALSE(failure);
          there.set_value();
        });
    there.get_future().get();
    for (int i = 0; i < 2000; ++i) {
      ASSERT_EQ(block[i], static_cast<float>(round));
      block[i] += 1;
    }
    stager.toDevice({{first.ptr(), block, first.nbytes()}, {second.ptr(), block + 1000, second.nbytes()}});
    stager.giveAfterCopies(block);
    stager.waitOn(caller);
    cudaStreamSynchronize(static_cast<cudaStream_t>(caller));
    EXPECT_EQ(second.values(), std::vector<float>(1000, static_cast<float>(round + 1)));
  }
}

TEST_F(StrictDevice, AllocatingLeavesAnotherThreadsCaptureWhole) {
  std::promise<void> captures;
  std::promise<void> over;
  std::thread capturing([&] {
    fake_cuda::beginCapture(cudaStreamCaptureModeGlobal);
    captures.set_value();
    over.get_future().get();
    EXPECT_TRUE(fake_cuda::endCapture());
  });
  captures.get_future().get();
  runtime->freePinned(runtime->allocatePinned(100));
  runtime->freeDevice(runtime->allocateDevice(100));
  over.set_value();
  capturing.join();
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal) << "the thread's own mode is back";
  cudaThreadExchangeStreamCaptureMode(&mode);
}

TEST_F(StrictDevice, AWaitingStagerAsksNothing) {
  Stager stager(*runtime, 0, out, in);
  const DeviceFloats tensor({1, 2});
  fake_cuda::hold(static_cast<cudaStream_t>(caller));
  std::promise<void> there;
  auto ready = there.get_future();
  const int before = fake_cuda::queries();
  stager.toHost({{tensor.ptr(), stager.take(8), 8}}, caller, [&](size_t, const std::optional<ErrorRecord>&) {
    there.set_value();
  });
  EXPECT_EQ(ready.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  EXPECT_EQ(fake_cuda::queries(), before);
  fake_cuda::letGo();
  ready.get();
}

TEST_F(StrictDevice, ABreakdownIsReportedByWhatWaits) {
  const DeviceFloats tensor({1, 2});
  Stager stager(*runtime, 0, out, in);
  fake_cuda::hold(static_cast<cudaStream_t>(caller));
  std::promise<std::optional<ErrorRecord>> there;
  stager.toHost({{tensor.ptr(), stager.take(8), 8}}, caller, [&](size_t, const std::optional<ErrorRecord>& failure) {
    there.set_value(failure);
  });
  fake_cuda::breakDown();
  const std::optional<ErrorRecord> failure = there.get_future().get();
  fake_cuda::letGo();
  fake_cuda::mend();
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->cause, "cudaErrorLaunchFailure");
}

TEST_F(StrictDevice, ADeviceThatIsTooOldIsNamed) {
  fake_cuda::setCapability(7);
  try {
    runtime->checkDevice();
    ADD_FAILURE() << "its kernels could not run";
  } catch (const Error& error) {
    EXPECT_EQ(error.record().code, ErrorCode::Unsupported);
    EXPECT_THAT(error.record().summary, HasSubstr("cuda:0 has compute capability 7.5"));
  }
  fake_cuda::setCapability(8);
  EXPECT_NO_THROW(runtime->checkDevice());
}

} // namespace
} // namespace pycomm::cuda
