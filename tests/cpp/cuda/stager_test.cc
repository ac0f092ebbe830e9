// The staging of CUDA tensors through pinned memory, on a device whose streams the test moves on by hand.
#include "device/stager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "allocations.h"
#include "host_device.h"

namespace pycomm::cuda {
namespace {

using ::testing::ElementsAre;
using testing::kCaller;

Stream const kOut = reinterpret_cast<Stream>(0x1);
Stream const kIn = reinterpret_cast<Stream>(0x2);

class ManualDevice final : public testing::HostDevice {
 public:
  void* allocatePinned(size_t nbytes) override {
    ++pinned;
    return HostDevice::allocatePinned(nbytes);
  }
  void freePinned(void* ptr) noexcept override {
    --pinned;
    HostDevice::freePinned(ptr);
  }
  Event createEvent() override {
    ++events;
    return HostDevice::createEvent();
  }
  void destroyEvent(Event event) noexcept override {
    --events;
    HostDevice::destroyEvent(event);
  }
  void record(Event, Stream stream) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    journal.push_back("record " + nameOf(stream));
  }
  void streamWait(Stream stream, Event) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    journal.push_back("wait " + nameOf(stream));
  }
  void copy(void* dst, const void* src, size_t nbytes, Stream stream) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    journal.push_back("copy " + std::to_string(nbytes) + " " + nameOf(stream));
    if (refuse_copies) {
      throw Error(ErrorCode::SystemError, "CUDA: cudaMemcpyAsync failed.");
    }
    std::memcpy(dst, src, nbytes);
  }
  void whenReached(Stream stream, Reached reached, void* context) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    journal.push_back("notify " + nameOf(stream));
    awaited_.emplace_back(reached, context);
  }

  /// Everything put onto streams so far has happened.
  void reachAll() {
    reach(1 << 20, nullptr);
  }
  /// The first so many places that are watched have been reached, or never will be.
  void reach(size_t count, const char* failure = nullptr) {
    for (; count > 0; --count) {
      std::unique_lock<std::mutex> lock(mutex_);
      if (awaited_.empty()) {
        return;
      }
      const auto [reached, context] = awaited_.front();
      awaited_.pop_front();
      lock.unlock();
      reached(context, failure);
    }
  }
  void breakDown() {
    reach(1 << 20, "cudaErrorLaunchFailure");
  }

  std::vector<std::string> journal;
  bool refuse_copies = false;
  std::atomic<int> pinned{0};
  std::atomic<int> events{0};

 private:
  static std::string nameOf(Stream stream) {
    return stream == kOut ? "out" : (stream == kIn ? "in" : "caller");
  }
  std::mutex mutex_;
  std::deque<std::pair<Reached, void*>> awaited_;
};

using Verdict = std::optional<ErrorRecord>;

/// A `ready` that keeps its promise.
Stager::Ready promising(const std::shared_ptr<std::promise<Verdict>>& promise) {
  return [promise](size_t, const Verdict& failure) { promise->set_value(failure); };
}

TEST(Stager, CopiesBehindTheCallerAndIsReadyWhenTheyHaveEnded) {
  ManualDevice device;
  Stager stager(device, 0, kOut, kIn);
  std::vector<int> tensor = {1, 2, 3};
  auto* const block = static_cast<int*>(stager.take(12));
  const auto promise = std::make_shared<std::promise<Verdict>>();
  auto ready = promise->get_future();
  stager.toHost({{tensor.data(), block, 8}, {tensor.data() + 2, block + 2, 4}}, kCaller, promising(promise));
  EXPECT_THAT(
      device.journal, ElementsAre("record caller", "wait in", "wait out", "copy 8 out", "copy 4 out", "notify out"));
  EXPECT_EQ(ready.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout) << "the copies have not ended";
  device.reachAll();
  EXPECT_FALSE(ready.get());
  EXPECT_EQ(block[2], 3);

  block[0] = 40;
  device.journal.clear();
  stager.toDevice({{tensor.data(), block, 12}});
  stager.giveAfterCopies(block);
  stager.waitOn(kCaller);
  EXPECT_THAT(device.journal, ElementsAre("copy 12 in", "notify in", "record in", "wait caller"));
  EXPECT_EQ(tensor[0], 40);
  device.reachAll(); // whose end the stager waits for
}

TEST(Stager, ABlockIsUsedAgainOnlyWhenTheDeviceHasReadIt) {
  ManualDevice device;
  {
    Stager stager(device, 0, kOut, kIn);
    int value = 0;
    void* const first = stager.take(100);
    stager.toDevice({{&value, first, 4}});
    stager.giveAfterCopies(first);
    void* const second = stager.take(100);
    EXPECT_NE(second, first) << "the device may still read it";
    device.reachAll();
    EXPECT_EQ(stager.take(100), first);
    stager.give(second);
    EXPECT_EQ(stager.take(1000), second) << "same class";
    EXPECT_EQ(device.pinned, 2);
    void* const large = stager.take((64 << 10) + 1);
    EXPECT_NE(large, nullptr);
    EXPECT_EQ(device.pinned, 3) << "another class";
  }
  EXPECT_EQ(device.pinned, 0);
  EXPECT_EQ(device.events, 0);
}

// An exception there would end the process: CUDA's thread is not pycomm's.
TEST(Stager, ANoticeNeedsNoMemory) {
  ManualDevice device;
  Stager stager(device, 0, kOut, kIn);
  int value = 0;
  void* const block = stager.take(4);
  for (const char* const failure : {static_cast<const char*>(nullptr), "cudaErrorLaunchFailure"}) {
    const auto promise = std::make_shared<std::promise<Verdict>>();
    stager.toHost({{&value, block, 4}}, kCaller, promising(promise));
    stager.giveAfterCopies(stager.take(4));
    pycomm::testing::failAllocation(1);
    EXPECT_NO_THROW(device.reach(2, failure));
    pycomm::testing::failAllocation(0);
    const Verdict verdict = promise->get_future().get();
    EXPECT_EQ(verdict.has_value(), failure != nullptr);
  }
}

TEST(Stager, PiecesAreReadyInTheirOrder) {
  ManualDevice device;
  std::vector<int> order;
  std::promise<void> all;
  Stager stager(device, 0, kOut, kIn);
  int value = 0;
  void* const block = stager.take(4);
  for (int piece = 0; piece < 5; ++piece) {
    // One without copies among them: it must not overtake.
    const std::vector<Stager::Copy> copies = {{&value, block, 4}};
    stager.toHost(
        piece == 2 ? std::vector<Stager::Copy>() : copies, kCaller, [&, piece](size_t, const Verdict& failure) {
          EXPECT_FALSE(failure);
          order.push_back(piece);
          if (piece == 4) {
            all.set_value();
          }
        });
  }
  device.reachAll();
  all.get_future().get();
  EXPECT_THAT(order, ElementsAre(0, 1, 2, 3, 4));
}

TEST(Stager, EachCopyOfACallIsToldApart) {
  ManualDevice device;
  std::mutex mutex;
  std::vector<size_t> told;
  std::promise<void> all;
  std::vector<int> tensor = {1, 2, 3};
  Stager stager(device, 0, kOut, kIn);
  auto* const block = static_cast<int*>(stager.take(12));
  const auto ready = [&](size_t ended, const Verdict& failure) {
    EXPECT_FALSE(failure);
    const std::lock_guard<std::mutex> lock(mutex);
    told.push_back(ended);
    if (ended == 3) {
      all.set_value();
    }
  };
  stager.toHost({{&tensor[2], block + 2, 4}, {&tensor[0], block, 4}, {&tensor[1], block + 1, 4}}, kCaller, ready, true);
  EXPECT_THAT(
      device.journal,
      ElementsAre(
          "record caller",
          "wait in",
          "wait out",
          "copy 4 out",
          "notify out",
          "copy 4 out",
          "notify out",
          "copy 4 out",
          "notify out"));
  device.reach(1);
  const auto isTold = [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    return !told.empty();
  };
  for (int i = 0; i < 6000 && !isTold(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    EXPECT_THAT(told, ElementsAre(1)) << "one has ended, the others have not";
  }
  device.reachAll();
  all.get_future().get();
  EXPECT_THAT(told, ElementsAre(1, 2, 3));
}

TEST(Stager, AFailureAmongCopiesToldApartIsToldOnce) {
  ManualDevice device;
  std::promise<Verdict> promise;
  std::atomic<int> calls{0};
  int value = 0;
  {
    Stager stager(device, 0, kOut, kIn);
    void* const block = stager.take(4);
    const std::vector<Stager::Copy> copies(3, {&value, block, 4});
    const auto ready = [&](size_t, const Verdict& failure) {
      if (++calls == 1) {
        promise.set_value(failure);
      }
    };
    stager.toHost(copies, kCaller, ready, true);
    device.breakDown();
    EXPECT_TRUE(promise.get_future().get());
  } // the thread has ended
  EXPECT_EQ(calls, 1);
}

TEST(Stager, ADeviceThatBreaksInTheMiddleFailsWhatWaits) {
  ManualDevice device;
  Stager stager(device, 0, kOut, kIn);
  int value = 0;
  void* const block = stager.take(4);
  const auto promise = std::make_shared<std::promise<Verdict>>();
  stager.toHost({{&value, block, 4}}, kCaller, promising(promise));
  device.breakDown();
  const Verdict failure = promise->get_future().get();
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->summary, "CUDA: a tensor could not leave its device.");
  EXPECT_EQ(failure->cause, "cudaErrorLaunchFailure");

  device.refuse_copies = true;
  bool called = false;
  EXPECT_THROW(stager.toHost({{&value, block, 4}}, kCaller, [&](size_t, const Verdict&) { called = true; }), Error);
  EXPECT_FALSE(called) << "toHost() has thrown, so the callback must not report the error again";
}

TEST(Stager, ClosingTellsWhatIsNotReady) {
  ManualDevice device;
  const auto promise = std::make_shared<std::promise<Verdict>>();
  int value = 0;
  auto stager = std::make_unique<Stager>(device, 0, kOut, kIn);
  stager->toHost({{&value, stager->take(4), 4}}, kCaller, promising(promise));
  auto ready = promise->get_future();
  std::thread closing([&] { stager.reset(); });
  EXPECT_EQ(ready.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout) << "the copy writes the block";
  device.reachAll();
  const Verdict failure = ready.get();
  closing.join();
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code, ErrorCode::ShutDown);
  EXPECT_EQ(device.pinned, 0);
}

TEST(Stager, WhatNeverEndsKeepsItsMemoryAndNobodyElse) {
  ManualDevice device;
  const auto promise = std::make_shared<std::promise<Verdict>>();
  auto ready = promise->get_future();
  std::vector<int> tensor = {7};
  auto stager = std::make_unique<Stager>(device, 0, kOut, kIn);
  stager->toHost({{tensor.data(), stager->take(4), 4}}, kCaller, promising(promise));
  void* const read = stager->take(4);
  stager->toDevice({{tensor.data(), read, 4}});
  stager->giveAfterCopies(read);
  stager->stop(std::chrono::milliseconds(20));
  EXPECT_THROW(stager->toHost({{tensor.data(), read, 4}}, kCaller, [](size_t, const Verdict&) {}), Error);
  stager.reset();
  EXPECT_EQ(device.pinned, 2) << "the device may still use them";
  device.reachAll();
  const Verdict failure = ready.get();
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code, ErrorCode::ShutDown);
  for (int i = 0; i < 1000 && (device.pinned != 0 || device.events != 0); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(device.pinned, 0);
  EXPECT_EQ(device.events, 0);
}

// An exception there would end the process.
TEST(Stager, ClosingNeedsNoMemory) {
  ManualDevice device;
  std::promise<void> armed;
  std::promise<std::pair<ErrorCode, bool>> ended;
  int value = 0;
  auto stager = std::make_unique<Stager>(device, 0, kOut, kIn);
  const std::vector<Stager::Copy> copies = {{&value, stager->take(4), 4}};
  stager->toHost(copies, kCaller, [&](size_t, const Verdict&) {
    armed.set_value();
    pycomm::testing::failAllocation(1); // of the stager's thread
  });
  stager->toHost(copies, kCaller, [&](size_t, const Verdict& failure) {
    const bool struck = pycomm::testing::allocationFailed();
    pycomm::testing::failAllocation(0);
    ended.set_value({failure ? failure->code : ErrorCode::Ok, struck});
  });
  device.reach(1);
  armed.get_future().get();
  stager->stop(std::chrono::milliseconds(20));
  stager.reset();
  device.reachAll();
  const auto [code, struck] = ended.get_future().get();
  EXPECT_EQ(code, ErrorCode::ShutDown);
  EXPECT_TRUE(struck);
  for (int i = 0; i < 1000 && device.pinned != 0; ++i) { // the thread has ended then
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(device.pinned, 0);
}

} // namespace
} // namespace pycomm::cuda
