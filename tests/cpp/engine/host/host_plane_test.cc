// The host plane alone: each rank a thread with a plane of its own, all over one mapping, so that ThreadSanitizer sees every order
// that the shared memory relies on. Over the mappings of several processes it runs in tests/python, over several of one process in
// group_test.cc.
#include "engine/host/host_plane.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>

#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "armed_faults.h"
#include "numeric/convert.h"
#include "views.h"
#include "within.h"

namespace pycomm::testing {
namespace {

/// Waits until all operations have ended.
void failNow(HostPlane& plane, const ErrorRecord& cause, const OldestEnds& told = nullptr) {
  std::promise<void> ended;
  plane.fail(cause, told, [&] { ended.set_value(); });
  ASSERT_EQ(ended.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
}

/// Ranks that notice something tell all planes, as the control planes would.
class Host {
 public:
  explicit Host(int size, HostPlane::Config config = {}, bool heaps = false)
      : size_(size), arena_(std::make_shared<SharedArena>(SharedArena::create(HostView::totalNbytes(size)))) {
    arena_->commit(0, HostView::commonNbytes(size));
    HostHeaps shared;
    for (int rank = 0; heaps && rank < size; ++rank) {
      heaps_.push_back(std::make_shared<SharedHeap>(SharedArena::create(64 << 20)));
      shared.ranges.push_back(
          heaps_.back()->range()); // one mapping, so that ThreadSanitizer knows both sides as one memory
    }
    ranges_ = shared.ranges;
    for (int rank = 0; rank < size; ++rank) {
      GroupIdentity& identity = identities_.emplace_back();
      identity.rank = rank;
      identity.size = size;
      identity.name = "test";
      for (int host = 0; host < size; ++host) {
        identity.hosts.emplace_back("here");
      }
      HostPlane::Events events;
      events.noticed = [this](ErrorRecord record) {
        takeMemory();
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!noticed_) {
          noticed_ = std::move(record);
        }
        changed_.notify_all();
      };
      events.stuck = [this, rank](const std::shared_ptr<Operation>&, uint64_t /*lacking*/) {
        takeMemory();
        const std::lock_guard<std::mutex> lock(mutex_);
        ++stuck_[rank];
        changed_.notify_all();
      };
      HostHeaps mine = shared;
      mine.own = heaps ? heaps_[static_cast<size_t>(rank)] : nullptr;
      planes_.push_back(std::make_unique<HostPlane>(identity, arena_, std::move(mine), config, std::move(events)));
    }
  }
  ~Host() {
    ErrorRecord reason;
    reason.code = ErrorCode::ShutDown;
    for (const auto& plane : planes_) {
      plane->close(reason);
    }
  }

  void run(const std::function<void(int rank, HostPlane& plane)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank) {
      threads.emplace_back([&, rank] { body(rank, *planes_[static_cast<size_t>(rank)]); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
  ErrorRecord waitForNotice() {
    std::unique_lock<std::mutex> lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(20), [&] { return noticed_.has_value(); }));
    return noticed_.value_or(ErrorRecord());
  }
  void waitUntilStuck(int rank, int times = 1) {
    std::unique_lock<std::mutex> lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(20), [&] { return stuck_[rank] >= times; }));
  }
  void failAll(const ErrorRecord& cause) {
    for (const auto& plane : planes_) {
      failNow(*plane, cause);
    }
  }
  /// So many events find no memory.
  void failAllocations(int count) {
    without_memory_ = count;
  }
  [[nodiscard]] int allocationsToFail() const {
    return without_memory_;
  }
  SharedHeap& heap(int rank) {
    return *heaps_[static_cast<size_t>(rank)];
  }
  HostView view(int rank) {
    return {arena_->at(0), rank, size_};
  }
  /// What a rank that a test runs by hand has, with the heaps of all ranks at these places.
  std::unique_ptr<HostMemory> memory(int rank, std::vector<BufferView> ranges) {
    const auto at = static_cast<size_t>(rank);
    return std::make_unique<HostMemory>(
        identities_[at], std::vector<int>(), arena_, HostHeaps{heaps_[at], {}, std::move(ranges)});
  }
  std::unique_ptr<HostMemory> memory(int rank) {
    return memory(rank, ranges_);
  }
  HostPlane& plane(int rank) {
    return *planes_[static_cast<size_t>(rank)];
  }

 private:
  void takeMemory() {
    int times = without_memory_;
    while (times > 0 && !without_memory_.compare_exchange_weak(times, times - 1)) {
    }
    if (times > 0) {
      throw std::bad_alloc();
    }
  }

  int size_;
  std::atomic<int> without_memory_{0};
  std::shared_ptr<SharedArena> arena_;
  std::vector<std::shared_ptr<SharedHeap>> heaps_;
  std::vector<BufferView> ranges_;
  std::deque<GroupIdentity> identities_;
  std::vector<std::unique_ptr<HostPlane>> planes_;
  std::mutex mutex_; ///< guards the rest
  std::condition_variable changed_;
  std::optional<ErrorRecord> noticed_;
  std::map<int, int> stuck_;
};

struct Wish {
  Collective kind = Collective::AllReduce;
  int64_t numel = 1;
  ReduceOp op = ReduceOp::None;
  DType dtype = DType::Float32;
  int root = -1;
  double premul = 1.0;
};

Operation::Request requestOf(
    std::atomic<int64_t>& counter,
    const Wish& wish,
    ConstBufferView input,
    BufferView output) {
  Operation::Request request;
  request.id = takeOperationId(counter, 1);
  request.descriptor.kind = wish.kind;
  request.descriptor.dtype = wish.dtype;
  request.descriptor.reduce_op = wish.op;
  request.descriptor.numel = wish.numel;
  request.descriptor.root = wish.root;
  request.descriptor.algorithm = Algorithm::SharedMemory;
  request.extras().premul_factor = wish.premul;
  request.input = input;
  request.output = output;
  return request;
}

std::shared_ptr<Operation> post(
    HostPlane& plane,
    std::atomic<int64_t>& counter,
    const Wish& wish,
    ConstBufferView input,
    BufferView output,
    bool waits) {
  std::shared_ptr<Operation> made;
  const auto make = [&] { return std::make_shared<Operation>(requestOf(counter, wish, input, output)); };
  EXPECT_TRUE(plane.post(std::cref(make), waits, made));
  return made;
}

void finish(HostPlane& plane, const Operation& operation) {
  const Deadline deadline = Deadline::after(60000);
  while (!operation.done() && !deadline.expired()) {
    if (!plane.drive(operation, Deadline::after(100))) {
      (void)operation.wait(Deadline::after(100));
    }
  }
  ASSERT_TRUE(operation.done());
}

/// Small whole numbers, so that sums are exact.
float valueOf(int rank, size_t i) {
  return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 101);
}

std::vector<float> valuesOf(int rank, size_t numel) {
  std::vector<float> values(numel);
  for (size_t i = 0; i < numel; ++i) {
    values[i] = valueOf(rank, i);
  }
  return values;
}

/// A tensor in a rank's heap.
class HeapTensor {
 public:
  HeapTensor(SharedHeap& heap, const std::vector<float>& values)
      : heap_(heap), numel_(values.size()), data_(static_cast<float*>(heap.allocate(numel_ * sizeof(float)))) {
    std::copy(values.begin(), values.end(), data_);
  }
  ~HeapTensor() {
    heap_.release(data_);
  }
  HeapTensor(const HeapTensor&) = delete;
  HeapTensor& operator=(const HeapTensor&) = delete;
  BufferView view() {
    return {reinterpret_cast<std::byte*>(data_), numel_ * sizeof(float)};
  }
  float& operator[](size_t i) {
    return data_[i];
  }

 private:
  SharedHeap& heap_;
  size_t numel_;
  float* data_;
};

class HostPlaneSizes : public ::testing::TestWithParam<int> {};

// Small ones, one of exactly what a slot holds, one element more, several rounds with a crooked end: all in one run, so that rounds and
// slots of one operation meet those of the next.
TEST_P(HostPlaneSizes, EveryCollectiveGivesWhatItSays) {
  const int size = GetParam();
  Host host(size);
  const size_t round = kHostStageNbytes / sizeof(float);
  const std::vector<size_t> numels{1, 3, 0, 2048, 2049, round * 3 + 5, 7, round * 2, 700};
  host.run([&](int rank, HostPlane& plane) {
    std::atomic<int64_t> counter{0};
    for (const size_t numel : numels) {
      const auto n = static_cast<int64_t>(numel);
      std::vector<float> sum = valuesOf(rank, numel);
      std::vector<float> most = valuesOf(rank, numel);
      std::vector<float> sent = valuesOf(rank, numel);
      std::vector<float> part = valuesOf(rank, numel);
      std::vector<float> all(numel * static_cast<size_t>(size));
      std::vector<float> parts = valuesOf(rank, numel * static_cast<size_t>(size));
      std::vector<float> own(numel);
      const int root = static_cast<int>(numel) % size;
      std::vector<std::shared_ptr<Operation>> operations;
      operations.push_back(
          post(plane, counter, {Collective::AllReduce, n, ReduceOp::Sum}, viewOf(sum), viewOf(sum), false));
      operations.push_back(
          post(plane, counter, {Collective::AllReduce, n, ReduceOp::Max}, viewOf(most), viewOf(most), true));
      operations.push_back(post(plane, counter, {Collective::Barrier, 0}, {}, {}, true));
      operations.push_back(post(
          plane,
          counter,
          {Collective::Broadcast, n, ReduceOp::None, DType::Float32, root},
          viewOf(sent),
          viewOf(sent),
          true));
      operations.push_back(post(plane, counter, {Collective::AllGather, n}, viewOf(part), viewOf(all), false));
      operations.push_back(
          post(plane, counter, {Collective::ReduceScatter, n, ReduceOp::Sum}, viewOf(parts), viewOf(own), true));
      for (const auto& operation : operations) {
        finish(plane, *operation);
        ASSERT_FALSE(operation->error()) << operation->error()->text();
      }
      for (size_t i = 0; i < numel; ++i) {
        float total = 0;
        float largest = 0;
        float mine = 0;
        for (int peer = 0; peer < size; ++peer) {
          total += valueOf(peer, i);
          largest = std::max(largest, valueOf(peer, i));
          mine += valueOf(peer, static_cast<size_t>(rank) * numel + i);
          ASSERT_EQ(all[static_cast<size_t>(peer) * numel + i], valueOf(peer, i)) << numel << " at " << i;
        }
        ASSERT_EQ(sum[i], total) << numel << " at " << i;
        ASSERT_EQ(most[i], largest) << numel << " at " << i;
        ASSERT_EQ(own[i], mine) << numel << " at " << i;
        ASSERT_EQ(sent[i], valueOf(root, i)) << numel << " at " << i;
      }
    }
  });
}

// More than a rank may be ahead, small and large in turn, while ranks go at different speeds.
TEST_P(HostPlaneSizes, ManyInFlight) {
  const int size = GetParam();
  Host host(size);
  host.run([&](int rank, HostPlane& plane) {
    std::atomic<int64_t> counter{0};
    std::vector<std::vector<float>> tensors;
    std::vector<std::shared_ptr<Operation>> operations;
    for (size_t k = 0; k < 5 * kHostSlots; ++k) {
      tensors.push_back(valuesOf(rank, k % 7 == 0 ? 9000 + k : k));
    }
    for (std::vector<float>& values : tensors) {
      const auto n = static_cast<int64_t>(values.size());
      operations.push_back(post(
          plane, counter, {Collective::AllReduce, n, ReduceOp::Sum}, viewOf(values), viewOf(values), rank % 2 == 0));
    }
    for (size_t k = operations.size(); k-- > 0;) {
      finish(plane, *operations[k]);
    }
    for (const std::vector<float>& values : tensors) {
      for (size_t i = 0; i < values.size(); ++i) {
        float total = 0;
        for (int peer = 0; peer < size; ++peer) {
          total += valueOf(peer, i);
        }
        ASSERT_EQ(values[i], total) << i;
      }
    }
  });
}

// In place and through stages in turn: rounds are counted alike. Several steps of one operation, crooked ends.
TEST_P(HostPlaneSizes, TensorsThatAllCanReachAreUsedInPlace) {
  const int size = GetParam();
  Host host(size, {}, true);
  host.run([&](int rank, HostPlane& plane) {
    std::atomic<int64_t> counter{0};
    SharedHeap& heap = host.heap(rank);
    for (const size_t numel : {size_t{2049}, size_t{1000003}, size_t{5000}}) {
      const auto n = static_cast<int64_t>(numel);
      const int root = static_cast<int>(numel) % size;
      HeapTensor sum(heap, valuesOf(rank, numel));
      HeapTensor sent(heap, valuesOf(rank, numel));
      HeapTensor part(heap, valuesOf(rank, numel));
      HeapTensor parts(heap, valuesOf(rank, numel * static_cast<size_t>(size)));
      std::vector<float> staged = valuesOf(rank, numel);
      HeapTensor mixed(heap, valuesOf(rank, numel)); // in a heap on some ranks only
      std::vector<float> ordinary = valuesOf(rank, numel);
      std::vector<float> all(numel * static_cast<size_t>(size));
      std::vector<float> own(numel);
      const BufferView either = rank == 0 ? mixed.view() : viewOf(ordinary);
      const Wish reduce{Collective::AllReduce, n, ReduceOp::Sum};
      const Wish send{Collective::Broadcast, n, ReduceOp::None, DType::Float32, root};
      std::vector<std::shared_ptr<Operation>> operations;
      operations.push_back(post(plane, counter, reduce, sum.view(), sum.view(), false));
      operations.push_back(post(plane, counter, reduce, viewOf(staged), viewOf(staged), true));
      operations.push_back(post(plane, counter, send, sent.view(), sent.view(), false));
      operations.push_back(post(plane, counter, {Collective::AllGather, n}, part.view(), viewOf(all), true));
      operations.push_back(
          post(plane, counter, {Collective::ReduceScatter, n, ReduceOp::Sum}, parts.view(), viewOf(own), true));
      operations.push_back(post(plane, counter, reduce, either, either, true));
      for (const auto& operation : operations) {
        finish(plane, *operation);
        ASSERT_FALSE(operation->error()) << operation->error()->text();
      }
      for (size_t i = 0; i < numel; ++i) {
        float total = 0;
        float mine = 0;
        for (int peer = 0; peer < size; ++peer) {
          total += valueOf(peer, i);
          mine += valueOf(peer, static_cast<size_t>(rank) * numel + i);
          ASSERT_EQ(all[static_cast<size_t>(peer) * numel + i], valueOf(peer, i)) << numel << " at " << i;
        }
        ASSERT_EQ(sum[i], total) << numel << " at " << i;
        ASSERT_EQ(staged[i], total) << numel << " at " << i;
        ASSERT_EQ(rank == 0 ? mixed[i] : ordinary[i], total) << numel << " at " << i;
        ASSERT_EQ(own[i], mine) << numel << " at " << i;
        ASSERT_EQ(sent[i], valueOf(root, i)) << numel << " at " << i;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, HostPlaneSizes, ::testing::Values(2, 3, 5));

// Inexact sums: the fold must be in rank order, with one rounding of the small floats and one division.
TEST(HostPlane, SumsAreFoldedInRankOrderAndRoundedOnce) {
  constexpr int kSize = 3;
  for (const int64_t numel : {int64_t{100}, int64_t{700000}}) {
    Host host(kSize);
    std::vector<std::vector<uint16_t>> results(kSize);
    host.run([&](int rank, HostPlane& plane) {
      std::atomic<int64_t> counter{0};
      std::vector<float> exact(static_cast<size_t>(numel));
      for (size_t i = 0; i < exact.size(); ++i) {
        exact[i] = std::ldexp(1.0F + valueOf(rank, i) / 128, 5 * rank);
      }
      std::vector<uint16_t> values(exact.size());
      convert(DType::BFloat16, values.data(), DType::Float32, exact.data(), exact.size());
      const auto operation = post(
          plane,
          counter,
          {Collective::AllReduce, numel, ReduceOp::Avg, DType::BFloat16},
          viewOf(values),
          viewOf(values),
          true);
      finish(plane, *operation);
      results[static_cast<size_t>(rank)] = values;
    });
    EXPECT_EQ(results[0], results[1]);
    EXPECT_EQ(results[0], results[2]);
    std::vector<float> got(static_cast<size_t>(numel));
    convert(DType::Float32, got.data(), DType::BFloat16, results[0].data(), got.size());
    for (size_t i = 0; i < got.size(); ++i) {
      float sum = 0;
      for (int rank = 0; rank < kSize; ++rank) {
        sum += std::ldexp(1.0F + valueOf(rank, i) / 128, 5 * rank); // the inputs are bf16 already: 7 bits
      }
      const float average = sum / kSize;
      uint16_t rounded = 0;
      convert(DType::BFloat16, &rounded, DType::Float32, &average, 1);
      ASSERT_EQ(results[0][i], rounded) << i;
    }
  }
}

TEST(HostPlane, PremulSumScalesEveryInput) {
  for (const int64_t numel : {int64_t{10}, int64_t{300000}}) {
    Host host(2);
    host.run([&](int rank, HostPlane& plane) {
      std::atomic<int64_t> counter{0};
      std::vector<float> values = valuesOf(rank, static_cast<size_t>(numel));
      Wish wish{Collective::AllReduce, numel, ReduceOp::PremulSum};
      wish.premul = 0.5;
      finish(plane, *post(plane, counter, wish, viewOf(values), viewOf(values), true));
      for (size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(values[i], (valueOf(0, i) + valueOf(1, i)) / 2);
      }
    });
  }
}

TEST(HostPlane, DifferentCallsAreAMismatchAndNothingIsWritten) {
  for (const size_t numel : {size_t{4}, size_t{50000}}) {
    Host host(2);
    host.run([&](int rank, HostPlane& plane) {
      std::atomic<int64_t> counter{0};
      std::vector<float> values(numel + static_cast<size_t>(rank), 1.0F);
      const std::vector<float> before = values;
      const auto operation = post(
          plane,
          counter,
          {Collective::AllReduce, static_cast<int64_t>(values.size()), ReduceOp::Sum},
          viewOf(values),
          viewOf(values),
          true);
      std::thread control([&] {
        const ErrorRecord record = host.waitForNotice();
        EXPECT_EQ(record.code, ErrorCode::CollectiveMismatch);
        EXPECT_NE(record.summary.find("float32 x " + std::to_string(numel)), std::string::npos) << record.summary;
        EXPECT_NE(record.summary.find("float32 x " + std::to_string(numel + 1)), std::string::npos) << record.summary;
        failNow(plane, record);
      });
      finish(plane, *operation);
      control.join();
      ASSERT_TRUE(operation->error());
      EXPECT_EQ(operation->error()->code, ErrorCode::CollectiveMismatch);
      EXPECT_EQ(values, before);
    });
  }
}

// The data loop watches over its deadline, and may have had no memory for the first report.
TEST(HostPlane, AnOperationThatWaitsIsReportedAgain) {
  Host host(2);
  std::vector<float> values(1, 1.0F);
  std::atomic<int64_t> counter{0};
  const auto operation =
      post(host.plane(0), counter, {Collective::AllReduce, 1, ReduceOp::Sum}, viewOf(values), viewOf(values), true);
  std::thread waiter([&] { finish(host.plane(0), *operation); });
  const TimePoint begin = Clock::now();
  host.waitUntilStuck(0, 3);
  EXPECT_GE(Clock::now() - begin, std::chrono::seconds(1)) << "not without a pause";
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(15));
  ErrorRecord cause;
  cause.code = ErrorCode::PeerDead;
  cause.peer = 1;
  failNow(host.plane(0), cause);
  waiter.join();
}

TEST(HostPlane, AFailureEndsACallerThatWaits) {
  Host host(2);
  std::vector<float> values(1, 1.0F);
  std::atomic<int64_t> counter{0};
  const auto operation =
      post(host.plane(0), counter, {Collective::AllReduce, 1, ReduceOp::Sum}, viewOf(values), viewOf(values), true);
  std::thread waiter([&] { finish(host.plane(0), *operation); });
  host.waitUntilStuck(0); // it sleeps, or is about to
  const HostPlane::WaitsFor found = host.plane(0).waitsFor(*operation);
  EXPECT_EQ(found.not_entered, hostBit(1));
  EXPECT_EQ(found.behind, -1);
  ErrorRecord cause;
  cause.code = ErrorCode::PeerDead;
  cause.peer = 1;
  std::optional<ErrorRecord> told;
  failNow(host.plane(0), cause, [&](const ErrorRecord& record, TimePoint) { told = record; });
  waiter.join();
  ASSERT_TRUE(operation->error());
  EXPECT_EQ(operation->error()->code, ErrorCode::PeerDead);
  EXPECT_EQ(operation->error()->peer, 1);
  EXPECT_EQ(operation->error()->op, "all_reduce");
  EXPECT_EQ(operation->error()->sequence, 1);
  EXPECT_EQ(operation->error()->bytes_total, 4);
  ASSERT_TRUE(told);
  std::shared_ptr<Operation> late;
  EXPECT_FALSE(host.plane(0).post([&] { return std::make_shared<Operation>(Operation::Request()); }, true, late));
}

/// Whether this process has a thread of that name.
bool hasThread(const std::string& thread_name) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(entry.path() / "comm") >> name;
    if (name == thread_name) {
      return true;
    }
  }
  return false;
}

TEST(HostPlane, PollsRunASmallOperationWithoutAnotherThread) {
  // One of an earlier test: a thread that was joined is listed until the kernel has had a core for it.
  for (const Deadline most = Deadline::after(20000); hasThread("pycomm-host") && !most.expired();) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Host host(3);
  std::array<std::atomic<int64_t>, 3> counters{};
  std::array<std::vector<float>, 3> values{valuesOf(0, 10), valuesOf(1, 10), valuesOf(2, 10)};
  std::array<std::shared_ptr<Operation>, 3> posted;
  const Wish wish{Collective::AllReduce, 10, ReduceOp::Sum};
  for (size_t rank = 0; rank < 3; ++rank) {
    HostPlane& plane = host.plane(static_cast<int>(rank));
    posted[rank] = post(plane, counters[rank], wish, viewOf(values[rank]), viewOf(values[rank]), true);
    plane.poll(); // this rank's part is there for the others
    for (size_t other = 0; other < rank; ++other) {
      EXPECT_EQ(posted[other]->done(), false) << "before rank 2 came";
    }
  }
  EXPECT_TRUE(posted[2]->done()); // the last one finds all parts
  host.plane(0).poll();
  host.plane(1).poll();
  EXPECT_TRUE(posted[0]->done());
  EXPECT_TRUE(posted[1]->done());
  EXPECT_EQ(values[0], values[1]);
  EXPECT_EQ(values[0], values[2]);
  EXPECT_FALSE(hasThread("pycomm-host"));
}

TEST(HostPlane, WhatAllHaveDoneTheirPartOfEndsWellAlsoInAFailure) {
  Host host(2);
  std::atomic<int64_t> counter0{0};
  std::atomic<int64_t> counter1{0};
  std::vector<float> mine = valuesOf(0, 10);
  std::vector<float> theirs = valuesOf(1, 10);
  std::vector<float> more(10);
  const Wish wish{Collective::AllReduce, 10, ReduceOp::Sum};
  // Rank 1 has entered, and rests; rank 0 ends the same operation, begins another one and gives up.
  const auto posted = post(host.plane(1), counter1, wish, viewOf(theirs), viewOf(theirs), true);
  (void)host.plane(1).drive(*posted, Deadline::after(0));
  const auto first = post(host.plane(0), counter0, wish, viewOf(mine), viewOf(mine), true);
  finish(host.plane(0), *first);
  ASSERT_FALSE(first->error());
  ErrorRecord cause;
  cause.code = ErrorCode::PeerLeft;
  cause.peer = 0;
  const auto never = post(host.plane(1), counter1, wish, viewOf(more), viewOf(more), true);
  failNow(host.plane(1), cause);
  ASSERT_TRUE(posted->done());
  EXPECT_FALSE(posted->error());
  EXPECT_EQ(theirs, mine);
  ASSERT_TRUE(never->done());
  EXPECT_TRUE(never->error());
}

// Rank 0 gives up while rank 1 has not entered. Rank 1 enters before it is notified of the failure: all inputs lie in the slots, and it
// must not report success of an operation that has failed on rank 0.
TEST(HostPlane, ALateRankDoesNotEndWhatAnotherHasGivenUp) {
  for (const Wish& wish :
       {Wish{Collective::AllReduce, 10, ReduceOp::Sum},
        Wish{Collective::AllGather, 10},
        Wish{Collective::Broadcast, 10, ReduceOp::None, DType::Float32, 0},
        Wish{Collective::Barrier, 0}}) {
    Host host(2);
    std::atomic<int64_t> counter0{0};
    std::atomic<int64_t> counter1{0};
    std::vector<float> mine = valuesOf(0, 10);
    std::vector<float> theirs = valuesOf(1, 10);
    std::vector<float> all0(20);
    std::vector<float> all1(20);
    const bool gathers = wish.kind == Collective::AllGather;
    const auto first = post(host.plane(0), counter0, wish, viewOf(mine), gathers ? viewOf(all0) : viewOf(mine), true);
    (void)host.plane(0).drive(*first, Deadline::after(0));
    ErrorRecord cause;
    cause.code = ErrorCode::Timeout;
    cause.peer = 1;
    failNow(host.plane(0), cause);
    ASSERT_TRUE(first->error());
    const auto late =
        post(host.plane(1), counter1, wish, viewOf(theirs), gathers ? viewOf(all1) : viewOf(theirs), true);
    (void)host.plane(1).drive(*late, Deadline::after(100));
    EXPECT_FALSE(late->done()) << static_cast<int>(wish.kind);
    EXPECT_EQ(host.plane(1).waitsFor(*late).not_entered, 0U) << "rank 0 had entered it: it is not the one to blame";
    failNow(host.plane(1), cause);
    ASSERT_TRUE(late->done());
    ASSERT_TRUE(late->error()) << static_cast<int>(wish.kind);
    EXPECT_EQ(late->error()->code, ErrorCode::Timeout);
    EXPECT_EQ(theirs, valuesOf(1, 10));
    EXPECT_EQ(all1, std::vector<float>(20));
  }
}

// Rank 2 has compared rank 0's entry before rank 0 gave up, and waited for rank 1 since.
TEST(HostPlane, ARankThatComparedEarlyDoesNotEndWhatAnotherHasGivenUp) {
  std::array<std::vector<float>, 3> values{valuesOf(0, 10), valuesOf(1, 10), valuesOf(2, 10)};
  Host host(3);
  std::array<std::atomic<int64_t>, 3> counters{};
  const Wish wish{Collective::AllReduce, 10, ReduceOp::Sum};
  std::array<std::shared_ptr<Operation>, 3> posted;
  const auto enter = [&](size_t rank) {
    HostPlane& plane = host.plane(static_cast<int>(rank));
    posted[rank] = post(plane, counters[rank], wish, viewOf(values[rank]), viewOf(values[rank]), true);
    (void)plane.drive(*posted[rank], Deadline::after(20));
  };
  enter(0);
  enter(2);
  ErrorRecord cause;
  cause.code = ErrorCode::Timeout;
  cause.peer = 1;
  failNow(host.plane(0), cause);
  ASSERT_TRUE(posted[0]->error());
  enter(1);
  (void)host.plane(2).drive(*posted[2], Deadline::after(100));
  EXPECT_FALSE(posted[1]->done());
  EXPECT_FALSE(posted[2]->done());
  failNow(host.plane(2), cause);
  ASSERT_TRUE(posted[2]->done());
  EXPECT_TRUE(posted[2]->error());
  failNow(host.plane(1), cause);
}

/// Waits until a thread of that name sleeps in clock_nanosleep: at a fault point's delay.
bool waitUntilDelayed(const std::string& thread_name) {
  for (const Deadline deadline = Deadline::after(10000); !deadline.expired();) {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      long call = -1;
      std::ifstream(entry.path() / "comm") >> name;
      std::ifstream(entry.path() / "syscall") >> call;
      if (name == thread_name && call == SYS_clock_nanosleep) {
        return true;
      }
    }
    std::this_thread::yield();
  }
  return false;
}

ErrorRecord unresponsive(int peer) {
  ErrorRecord cause;
  cause.code = ErrorCode::PeerUnresponsive;
  cause.peer = peer;
  return cause;
}

/// An all_reduce of two ranks in place, of which rank 1 runs step by step in a thread of its own, and sees rank 0's heap under another
/// address, as another process does.
class InPlacePair {
 public:
  static constexpr size_t kNumel = size_t{1} << 20; // two steps of each rank

  InPlacePair() {
    rank1_.enter();
    waiter_ = std::thread([&] { finish(host_.plane(0), *first_); });
    host_.waitUntilStuck(0); // it has done its own part
  }
  ~InPlacePair() {
    if (!first_->done()) {
      failNow(host_.plane(0), unresponsive(1));
    }
    waiter_.join();
  }
  HostTransfer::AdvanceResult step() {
    uint64_t blocked = 0;
    return rank1_.advance(rounds_, false, blocked);
  }
  HostPlane& plane() {
    return host_.plane(0);
  }
  /// Rank 0's.
  const Operation& operation() const {
    return *first_;
  }
  HostProgress& progress(int rank) {
    return host_.view(0).progress(rank);
  }
  /// Which pages of rank 0's tensor have no place for peers any more.
  std::vector<size_t> takenPages() {
    std::vector<size_t> taken;
    for (size_t page = 0; page < kNumel * sizeof(float) / kPage; ++page) {
      if (!host_.heap(0).placeOf(values.view().ptr + page * kPage, kPage)) {
        taken.push_back(page);
      }
    }
    return taken;
  }

  static constexpr size_t kPage = 4096;

 private:
  static std::vector<BufferView> withTheirs(Host& host, const SharedArena& theirs) {
    return {BufferView{theirs.at(0), theirs.nbytes()}, host.heap(1).range()};
  }

  Host host_{2, {}, true};
  const SharedArena theirs_ = SharedArena::attach(UniqueFd(::dup(host_.heap(0).arena().fd())), std::nullopt);
  const std::unique_ptr<HostMemory> memory1_ = host_.memory(1, withTheirs(host_, theirs_));
  HeapTensor other_{host_.heap(1), valuesOf(1, kNumel)};

 public:
  HeapTensor values{host_.heap(0), valuesOf(0, kNumel)};

 private:
  const Wish wish_{Collective::AllReduce, kNumel, ReduceOp::Sum};
  std::atomic<int64_t> counters_[2] = {0, 0};
  HostTransfer rank1_{
      *memory1_,
      std::make_shared<Operation>(requestOf(counters_[1], wish_, other_.view(), other_.view())),
      1};
  uint64_t rounds_ = 0;
  std::shared_ptr<Operation> first_ = post(host_.plane(0), counters_[0], wish_, values.view(), values.view(), true);
  std::thread waiter_;
};

// Rank 1 is stopped between two steps: it finds that rank 0 has given up before it writes again, so nothing has to be taken from it.
TEST(HostPlane, AfterAFailureAPeerBeginsNoStep) {
  InPlacePair pair;
  ASSERT_EQ(pair.step(), HostTransfer::AdvanceResult::Moved); // the descriptors agree
  ASSERT_EQ(pair.step(), HostTransfer::AdvanceResult::Moved); // the first half of rank 1's slice is written
  const TimePoint began = Clock::now();
  failNow(pair.plane(), unresponsive(1));
  EXPECT_EQ(pair.takenPages(), std::vector<size_t>());
  const std::vector<float> kept(&pair.values[0], &pair.values[0] + InPlacePair::kNumel);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(pair.step(), HostTransfer::AdvanceResult::Blocked);
  }
  EXPECT_TRUE(std::equal(kept.begin(), kept.end(), &pair.values[0]));
  EXPECT_EQ(pair.progress(1).writes.load(), 0U);
  EXPECT_WITHIN_MS(elapsedMs(began), 500);
}

// Rank 1 is stopped in the middle of a step, and goes on later: only the pages of that step are taken from it.
TEST(HostPlane, AfterAFailureAPeerThatWasStoppedInAStepReachesNothing) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  InPlacePair pair;
  ASSERT_EQ(pair.step(), HostTransfer::AdvanceResult::Moved);
  auto armed = std::make_unique<ArmedFaults>("host.write:1:hold");
  std::thread stopped([&] { EXPECT_EQ(pair.step(), HostTransfer::AdvanceResult::Moved); });
  ArmedFaults::waitUntilStruck();
  failNow(pair.plane(), unresponsive(1));
  EXPECT_NE(pair.progress(1).writes.load(), 0U) << "it is in its step";
  std::vector<size_t> step; // the first MiB of rank 1's slice, which is the second half
  for (size_t page = 0; page < (size_t{1} << 20) / InPlacePair::kPage; ++page) {
    step.push_back(page + InPlacePair::kNumel / 2 * sizeof(float) / InPlacePair::kPage);
  }
  EXPECT_EQ(pair.takenPages(), step);
  std::fill(&pair.values[0], &pair.values[0] + InPlacePair::kNumel, -1.0F);
  armed = nullptr;
  stopped.join();
  EXPECT_EQ(pair.step(), HostTransfer::AdvanceResult::Blocked);
  for (size_t i = 0; i < InPlacePair::kNumel; ++i) {
    ASSERT_EQ(pair.values[i], -1.0F) << i;
  }
}

// A rank that is in a step when its peer gives up, and a process that has ended in one, cost the peer no page.
TEST(HostPlane, AfterAFailureAPeerThatEndsItsStepKeepsReach) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  for (const bool dead : {false, true}) {
    InPlacePair pair;
    ErrorRecord cause = unresponsive(1);
    cause.code = dead ? ErrorCode::PeerDead : ErrorCode::Timeout;
    if (dead) {
      pair.plane().died(1);
    }
    pair.progress(1).writes.store(1 + InPlacePair::kNumel / 2);
    // The peer gets a core before the patience ends; nobody has patience with a dead one.
    auto armed = dead ? nullptr : std::make_unique<ArmedFaults>("host.pause:1:hold");
    std::thread peer([&] {
      if (!dead) {
        ArmedFaults::waitUntilStruck();
        EXPECT_NE(pair.progress(0).left.load(), 0U);
        pair.progress(1).writes.store(0);
        armed = nullptr;
      }
    });
    failNow(pair.plane(), cause);
    peer.join();
    EXPECT_EQ(pair.takenPages(), std::vector<size_t>());
  }
}

TEST(HostPlane, AFailureEndsTheWorkInPlaceAfterOneStep) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  constexpr size_t kNumel = size_t{4} << 20; // 16 MiB: the whole of it is to be gathered from two
  for (const bool closes : {false, true}) {
    Host host(2, {}, true);
    const ArmedFaults armed("reduce.step:1+:delay=100");
    std::vector<std::vector<float>> all(2, std::vector<float>(2 * kNumel));
    std::vector<std::unique_ptr<HeapTensor>> tensors;
    std::vector<std::shared_ptr<Operation>> operations;
    std::atomic<int64_t> counters[2] = {0, 0};
    const Wish wish{Collective::AllGather, kNumel};
    for (int rank = 0; rank < 2; ++rank) {
      const auto at = static_cast<size_t>(rank);
      tensors.push_back(std::make_unique<HeapTensor>(host.heap(rank), valuesOf(rank, kNumel)));
      operations.push_back(post(host.plane(rank), counters[rank], wish, tensors[at]->view(), viewOf(all[at]), false));
    }
    ASSERT_TRUE(waitUntilDelayed("pycomm-host"));
    const TimePoint began = Clock::now();
    ErrorRecord cause;
    cause.code = closes ? ErrorCode::ShutDown : ErrorCode::PeerDead;
    if (closes) {
      host.plane(0).close(cause);
    } else {
      failNow(host.plane(0), cause);
    }
    EXPECT_TRUE(operations[0]->error());
    EXPECT_WITHIN_MS(elapsedMs(began), 400); // the step that it is in, and some
    failNow(host.plane(1), cause);
  }
}

// Rank 1 is stopped when it has read rank 0's tensor in part; rank 0 gives up and overwrites its tensor; rank 1 goes on.
TEST(HostPlane, WhatWasReadFromARankThatGaveUpIsNoResult) {
  constexpr size_t kNumel = size_t{1} << 20;
  Host host(2, {}, true);
  HeapTensor own(host.heap(0), valuesOf(0, kNumel));
  HeapTensor theirs(host.heap(1), valuesOf(1, kNumel));
  std::vector<float> all0(2 * kNumel);
  std::vector<float> all1(2 * kNumel);
  const Wish wish{Collective::AllGather, kNumel};
  std::atomic<int64_t> counter1{0};
  const auto second = std::make_shared<Operation>(requestOf(counter1, wish, theirs.view(), viewOf(all1)));
  const auto memory1 = host.memory(1);
  HostTransfer rank1(*memory1, second, 1); // by hand, so that it can be stopped anywhere
  rank1.enter();

  std::atomic<int64_t> counter0{0};
  const auto first = post(host.plane(0), counter0, wish, own.view(), viewOf(all0), true);
  std::thread waiter([&] { finish(host.plane(0), *first); });
  host.waitUntilStuck(0); // it has read all that it wants
  uint64_t rounds = 0;
  uint64_t blocked = 0;
  ASSERT_EQ(rank1.advance(rounds, false, blocked), HostTransfer::AdvanceResult::Moved); // the descriptors agree
  ASSERT_EQ(rank1.advance(rounds, false, blocked), HostTransfer::AdvanceResult::Moved); // a part is read
  ErrorRecord cause;
  cause.code = ErrorCode::PeerUnresponsive;
  cause.peer = 1;
  failNow(host.plane(0), cause);
  waiter.join();
  ASSERT_TRUE(first->error());
  own[kNumel - 1] = -1.0F;
  HostTransfer::AdvanceResult result = HostTransfer::AdvanceResult::Moved;
  while (result == HostTransfer::AdvanceResult::Moved) {
    result = rank1.advance(rounds, false, blocked);
  }
  EXPECT_EQ(result, HostTransfer::AdvanceResult::Blocked);
}

// A rank with a bug writes a place into its slot that is not in its heap, or from which the operand does not fit into it.
TEST(HostPlane, APlaceOutsideOfAHeapIsTheFaultOfWhoWroteIt) {
  constexpr size_t kNumel = 100000;
  constexpr uint64_t kHeapNbytes = 64 << 20;
  constexpr uint64_t kLast = kHeapNbytes - kNumel * sizeof(float);
  for (const uint64_t place : {kLast + 4096, kHeapNbytes, kHeapNbytes + 4096, ~uint64_t{0} - 1, uint64_t{1} << 63}) {
    for (const bool output : {false, true}) {
      Host host(2, {}, true);
      HeapTensor own(host.heap(0), valuesOf(0, kNumel));
      HeapTensor theirs(host.heap(1), valuesOf(1, kNumel));
      const Wish wish{Collective::AllReduce, kNumel, ReduceOp::Sum};
      std::atomic<int64_t> counter1{0};
      const auto second = std::make_shared<Operation>(requestOf(counter1, wish, theirs.view(), theirs.view()));
      const auto memory1 = host.memory(1);
      HostTransfer rank1(*memory1, second, 1);
      rank1.enter();
      HostSlot& slot = host.view(1).slot(1, 1);
      ASSERT_NE(slot.input_place, 0U) << "it goes in place";
      (output ? slot.output_place : slot.input_place) = place + 1;

      std::atomic<int64_t> counter0{0};
      const auto first = post(host.plane(0), counter0, wish, own.view(), own.view(), true);
      std::thread waiter([&] { finish(host.plane(0), *first); });
      const ErrorRecord noticed = host.waitForNotice();
      EXPECT_EQ(noticed.code, ErrorCode::ProtocolViolation) << noticed.text();
      EXPECT_EQ(noticed.peer, 1);
      EXPECT_NE(noticed.summary.find("lies at " + std::to_string(place) + " of its heap"), std::string::npos);
      failNow(host.plane(0), noticed);
      waiter.join();
      ASSERT_TRUE(first->error());
      EXPECT_EQ(own[0], valueOf(0, 0)) << "nothing was written";
    }
  }
}

TEST(HostPlane, WhoLeavesIsNamedByThoseThatWait) {
  Host host(3);
  std::vector<float> values(1, 1.0F);
  std::atomic<int64_t> counter{0};
  const auto operation =
      post(host.plane(0), counter, {Collective::AllReduce, 1, ReduceOp::Sum}, viewOf(values), viewOf(values), true);
  std::thread waiter([&] { finish(host.plane(0), *operation); });
  host.waitUntilStuck(0);
  ErrorRecord reason;
  reason.code = ErrorCode::ShutDown;
  host.plane(1).close(reason);
  const ErrorRecord record = host.waitForNotice();
  EXPECT_EQ(record.code, ErrorCode::PeerLeft);
  EXPECT_EQ(record.peer, 1);
  host.failAll(record);
  waiter.join();
  EXPECT_EQ(operation->error()->code, ErrorCode::PeerLeft);
}

TEST(HostPlane, WhoLeavesAfterItsPartIsNotMissed) {
  Host host(2);
  host.run([&](int rank, HostPlane& plane) {
    std::atomic<int64_t> counter{0};
    for (int k = 0; k < 50; ++k) {
      std::vector<float> values = valuesOf(rank, 3000);
      const auto operation =
          post(plane, counter, {Collective::AllReduce, 3000, ReduceOp::Sum}, viewOf(values), viewOf(values), true);
      finish(plane, *operation);
      ASSERT_FALSE(operation->error()) << operation->error()->text();
    }
    ErrorRecord reason;
    reason.code = ErrorCode::ShutDown;
    plane.close(reason); // the other rank may still be reading
  });
}

// The plane's thread has found nothing left to do, and is about to unlock the plane: a thread that posts now cannot drive.
TEST(HostPlane, WhatIsPostedWhileTheThreadLeavesIsNotForgotten) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  Host host(2);
  std::atomic<int64_t> counter0{0};
  std::atomic<int64_t> counter1{0};
  std::vector<float> values(4, 1.0F);
  auto armed = std::make_unique<ArmedFaults>("host.rest:1:hold");
  const Wish wish{Collective::AllReduce, 1, ReduceOp::Sum};
  const auto view = [&](size_t i) { return BufferView{reinterpret_cast<std::byte*>(&values[i]), sizeof(float)}; };
  const auto first = post(host.plane(0), counter0, wish, view(0), view(0), false);
  finish(host.plane(1), *post(host.plane(1), counter1, wish, view(1), view(1), true));
  ASSERT_TRUE(first->wait(Deadline::after(20000)));
  ArmedFaults::waitUntilStruck();
  const auto second = post(host.plane(0), counter0, wish, view(2), view(2), true);
  EXPECT_FALSE(host.plane(0).drive(*second, Deadline::after(10000)));
  armed = nullptr;
  std::thread peer([&] { finish(host.plane(1), *post(host.plane(1), counter1, wish, view(3), view(3), true)); });
  EXPECT_TRUE(second->wait(Deadline::after(20000))); // as Group::wait does
  EXPECT_FALSE(second->error());
  finish(host.plane(0), *second); // else the peer would wait for ever
  peer.join();
}

// A peer that does not end its step is waited for. Neither the data loop nor a thread that issues an operation waits with it.
TEST(HostPlane, WhileAFailureTakesTensorsAwayNobodyElseWaits) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  InPlacePair pair;
  pair.progress(1).writes.store(1);
  auto armed = std::make_unique<ArmedFaults>("heap.detach:1:hold");
  std::promise<void> ended;
  const TimePoint began = Clock::now();
  pair.plane().fail(unresponsive(1), nullptr, [&] { ended.set_value(); });
  EXPECT_WITHIN_MS(elapsedMs(began), 20000); // the data loop would wait for the minute that a hold lasts
  ArmedFaults::waitUntilStruck();
  const TimePoint delayed = Clock::now();
  std::vector<float> other(1);
  std::atomic<int64_t> counter{1};
  (void)post(pair.plane(), counter, {Collective::AllReduce, 1, ReduceOp::Sum}, viewOf(other), viewOf(other), true);
  EXPECT_WITHIN_MS(elapsedMs(delayed), 20000); // a thread that issues an operation would wait, too
  EXPECT_FALSE(pair.operation().done()) << "its memory is not the user's yet";
  armed = nullptr;
  ASSERT_EQ(ended.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  ASSERT_TRUE(pair.operation().error());
  EXPECT_EQ(pair.operation().error()->code, ErrorCode::PeerUnresponsive);
}

// The group has failed, and the user closes it before the plane's thread has run.
TEST(HostPlane, CloseRightAfterAFailureKeepsTheCause) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  constexpr size_t kNumel = 100000;
  Host host(2, {}, true);
  HeapTensor values(host.heap(0), std::vector<float>(kNumel, 1.0F));
  std::atomic<int64_t> counter{0};
  const auto operation =
      post(host.plane(0), counter, {Collective::AllReduce, kNumel, ReduceOp::Sum}, values.view(), values.view(), true);
  (void)host.plane(0).drive(*operation, Deadline::after(0)); // peers may read and write the tensor from now on
  uint32_t left = 0;
  operation->onDone([&] { left = host.view(0).progress(0).left.load(); });
  const ArmedFaults armed("host.task:1:delay=2000");
  ErrorRecord cause;
  cause.code = ErrorCode::PeerDead;
  cause.summary = "Rank 1 is gone.";
  cause.peer = 1;
  std::atomic<bool> ended{false};
  host.plane(0).fail(cause, nullptr, [&] { ended = true; });
  ASSERT_TRUE(waitUntilDelayed("pycomm-host"));
  ErrorRecord reason;
  reason.code = ErrorCode::ShutDown;
  const TimePoint began = Clock::now();
  host.plane(0).close(reason);
  EXPECT_TRUE(ended);
  ASSERT_TRUE(operation->done());
  ASSERT_TRUE(operation->error());
  EXPECT_EQ(operation->error()->code, ErrorCode::PeerDead);
  EXPECT_EQ(operation->error()->summary, "Rank 1 is gone.");
  EXPECT_EQ(left, kGaveUp) << "a peer could take for a result what it reads in memory that is the user's again";
  EXPECT_EQ(host.view(0).progress(0).left.load(), kGaveUp);
  EXPECT_WITHIN_MS(elapsedMs(began), 5000);
}

TEST(HostPlane, WhatStopsThePlaneIsReportedOnceThereIsMemory) {
  for (const bool driven : {true, false}) {
    Host host(2);
    host.failAllocations(2);
    const TimePoint began = Clock::now();
    host.run([&](int rank, HostPlane& plane) {
      std::atomic<int64_t> counter{0};
      std::vector<float> mine(static_cast<size_t>(rank) + 1, 1.0F);
      const Wish wish{Collective::AllReduce, static_cast<int64_t>(mine.size()), ReduceOp::Sum};
      const auto operation = post(plane, counter, wish, viewOf(mine), viewOf(mine), driven);
      std::thread control([&] { failNow(plane, host.waitForNotice()); });
      finish(plane, *operation);
      control.join();
      ASSERT_TRUE(operation->error());
      EXPECT_EQ(operation->error()->code, ErrorCode::CollectiveMismatch) << operation->error()->text();
    });
    EXPECT_EQ(host.allocationsToFail(), 0);
    EXPECT_WITHIN_MS(elapsedMs(began), 5000);
  }
}

TEST(HostPlane, AnOperationThatWaitsIsReportedOnceThereIsMemory) {
  for (const bool driven : {true, false}) {
    Host host(2);
    std::atomic<int64_t> counter{0};
    std::vector<float> values(1, 1.0F);
    host.failAllocations(1);
    const TimePoint began = Clock::now();
    const auto operation =
        post(host.plane(0), counter, {Collective::AllReduce, 1, ReduceOp::Sum}, viewOf(values), viewOf(values), driven);
    std::thread waiter([&] { finish(host.plane(0), *operation); });
    host.waitUntilStuck(0);
    EXPECT_EQ(host.allocationsToFail(), 0);
    ErrorRecord cause;
    cause.code = ErrorCode::Timeout;
    failNow(host.plane(0), cause);
    waiter.join();
    ASSERT_TRUE(operation->error());
    EXPECT_EQ(operation->error()->code, ErrorCode::Timeout);
    EXPECT_WITHIN_MS(elapsedMs(began), 5000);
  }
}

// The operation is under way: an exception would tell its caller that it is not.
TEST(HostPlane, APostThatFindsNoMemoryForTheThreadFailsTheGroup) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  Host host(2);
  std::atomic<int64_t> counter{0};
  std::vector<float> values(1, 1.0F);
  const ArmedFaults armed("thread.start:1:nomem");
  const auto operation =
      post(host.plane(0), counter, {Collective::AllReduce, 1, ReduceOp::Sum}, viewOf(values), viewOf(values), false);
  EXPECT_EQ(faultPointTallies().front().strikes, 1);
  const ErrorRecord record = host.waitForNotice();
  EXPECT_EQ(record.code, ErrorCode::OutOfMemory);
  EXPECT_EQ(record.peer, 0);
  EXPECT_EQ(record.summary, "Rank 0 on here has no memory left.");
  failNow(host.plane(0), record);
  ASSERT_TRUE(operation->error());
  EXPECT_EQ(operation->error()->code, ErrorCode::OutOfMemory);
}

/// A plane of a group of two whose first notice waits until close() has returned, for 300 ms at most.
struct ClosingPlane {
  ClosingPlane() {
    arena->commit(0, HostView::commonNbytes(2));
    identity.rank = 0;
    identity.size = 2;
    identity.hosts = {"here", "here"};
    HostPlane::Events events;
    events.noticed = [this](const ErrorRecord&) {
      if (++notices == 1) { // the next may be that this rank leaves in the middle of the operation
        begun.set_value();
        late = closed.wait_for(std::chrono::milliseconds(300)) == std::future_status::ready;
      }
    };
    events.ended = [this](const OperationId&, const Descriptor&) { ++ends; };
    events.stuck = [](const std::shared_ptr<Operation>&, uint64_t) {};
    plane = std::make_unique<HostPlane>(identity, arena, HostHeaps(), HostPlane::Config(), std::move(events));
  }

  void close() {
    ErrorRecord reason;
    reason.code = ErrorCode::ShutDown;
    plane->close(reason);
    has_closed.set_value();
  }
  /// Issues one operation, made by `make`, on a thread of its own.
  std::future<void> postOne(std::function<std::shared_ptr<Operation>()> make) {
    return std::async(std::launch::async, [this, make = std::move(make)] {
      std::shared_ptr<Operation> made;
      try {
        (void)plane->post(std::cref(make), false, made);
      } catch (const std::bad_alloc&) { // what the test asked for
      }
    });
  }
  std::shared_ptr<Operation> one() {
    return std::make_shared<Operation>(
        requestOf(counter, {Collective::AllReduce, 1, ReduceOp::Sum}, viewOf(values), viewOf(values)));
  }

  GroupIdentity identity;
  std::shared_ptr<SharedArena> arena = std::make_shared<SharedArena>(SharedArena::create(HostView::totalNbytes(2)));
  std::vector<float> values = {1.0F};
  std::atomic<int64_t> counter{0};
  std::promise<void> begun; ///< the first event
  std::promise<void> has_closed;
  std::future<void> closed = has_closed.get_future();
  std::atomic<int> notices{0};
  std::atomic<int> ends{0};
  std::atomic<bool> late{false};
  std::unique_ptr<HostPlane> plane;
};

// Events post tasks to the group's loops. After close() the group lets these run a last time, and goes.
TEST(HostPlane, AnEndThatSomebodyWaitsForIsReportedBeforeCloseReturns) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  ClosingPlane pair;
  pair.plane->tellEndsUpTo(1);
  const ArmedFaults armed("host.posted:1:delay=500");
  const auto caller = pair.postOne([&] { return pair.one(); });
  while (faultPointTallies().front().visits == 0) {
    std::this_thread::yield();
  }
  pair.close();
  EXPECT_EQ(pair.ends, 1);
  caller.wait();
  EXPECT_EQ(pair.ends, 1);
}

TEST(HostPlane, AThreadThatDoesNotStartIsReportedBeforeCloseReturns) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  ClosingPlane pair;
  const ArmedFaults armed("thread.start:1:nomem");
  const auto caller = pair.postOne([&] { return pair.one(); });
  ASSERT_EQ(pair.begun.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  pair.close();
  caller.wait();
  EXPECT_FALSE(pair.late);
}

TEST(HostPlane, WhoLeavesIsNamedOnceThereIsMemory) {
  for (const bool driven : {true, false}) {
    Host host(2);
    std::atomic<int64_t> counter{0};
    std::vector<float> values(1, 1.0F);
    const auto operation =
        post(host.plane(0), counter, {Collective::AllReduce, 1, ReduceOp::Sum}, viewOf(values), viewOf(values), driven);
    std::thread waiter([&] { finish(host.plane(0), *operation); });
    host.waitUntilStuck(0);
    host.failAllocations(2);
    const TimePoint began = Clock::now();
    ErrorRecord reason;
    reason.code = ErrorCode::ShutDown;
    host.plane(1).close(reason);
    const ErrorRecord record = host.waitForNotice();
    EXPECT_EQ(record.code, ErrorCode::PeerLeft) << record.text();
    EXPECT_EQ(record.peer, 1);
    EXPECT_NE(record.summary.find("Rank 1 on here closed its process group"), std::string::npos) << record.summary;
    EXPECT_EQ(host.allocationsToFail(), 0);
    host.failAll(record);
    waiter.join();
    ASSERT_TRUE(operation->error());
    EXPECT_EQ(operation->error()->code, ErrorCode::PeerLeft);
    EXPECT_WITHIN_MS(elapsedMs(began), 5000);
  }
}

TEST(HostPlane, ServesOnlyWhatAllRanksNumberAlike) {
  ScheduleRequest request;
  request.kind = Collective::AllReduce;
  EXPECT_TRUE(HostPlane::serves(request, 2));
  EXPECT_FALSE(HostPlane::serves(request, 1));
  EXPECT_FALSE(HostPlane::serves(request, kMaxHostRanks + 1));
  {
    const IssueScope scope(continuationOf({1, 1}, 7, 1));
    EXPECT_FALSE(HostPlane::serves(request, 2));
  }
  request.algorithm = Algorithm::Ring;
  EXPECT_FALSE(HostPlane::serves(request, 2));
  request.algorithm = Algorithm::Auto;
  request.codec = Codec::Float16;
  EXPECT_FALSE(HostPlane::serves(request, 2));
}

} // namespace
} // namespace pycomm::testing
