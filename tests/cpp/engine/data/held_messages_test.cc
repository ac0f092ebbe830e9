// Messages that begin later than they were called, because their tensor was still on its device (Group::Call::held): no message overtakes
// another one of its peer and tag.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "engine/expect_done.h"
#include "engine/ranks.h"

namespace pycomm::testing {
namespace {

std::shared_ptr<Operation> message(
    Rank& self,
    Collective kind,
    uint32_t tag,
    std::vector<float>& values,
    bool held,
    int timeout_ms = 20000) {
  Group::Call call;
  call.schedule.kind = kind;
  call.schedule.dtype = DType::Float32;
  call.schedule.numel = static_cast<int64_t>(values.size());
  call.peer = 1 - self.rank;
  call.tag = tag;
  if (kind == Collective::Send) {
    call.input = viewOf(values);
  } else {
    call.output = viewOf(values);
  }
  call.deadline = Deadline::after(timeout_ms);
  call.held = held;
  return self.group.start(call);
}

void tcp(Group::Config& config) {
  config.transport = Transport::Tcp;
}

void awaitFlag(const std::atomic<bool>& flag) {
  for (const Deadline most = Deadline::after(20000); !flag && !most.expired();) {
    std::this_thread::yield();
  }
}

TEST(HeldMessages, ALaterSendOfTheTagDoesNotOvertake) {
  std::atomic<bool> looked{false};
  const auto body = [&](Rank& self) {
    std::vector<float> first{1};
    std::vector<float> second{2};
    std::vector<float> other{3};
    if (self.rank == 0) {
      const auto a = message(self, Collective::Send, 7, first, true);
      const auto b = message(self, Collective::Send, 7, second, false);
      expectDone(message(self, Collective::Send, 8, other, false)); // of another tag: it waits for nobody
      awaitFlag(looked);
      self.group.release(a);
      expectDone(a);
      expectDone(b);
      return;
    }
    std::vector<float> in_first(1);
    std::vector<float> in_second(1);
    std::vector<float> in_other(1);
    const auto a = message(self, Collective::Recv, 7, in_first, false);
    const auto b = message(self, Collective::Recv, 7, in_second, false);
    expectDone(message(self, Collective::Recv, 8, in_other, false)); // was sent last
    std::this_thread::sleep_for(std::chrono::milliseconds(100)); // questions for the first one go and are answered
    EXPECT_FALSE(a->done()) << "the second message overtook the first";
    looked = true;
    expectDone(a);
    expectDone(b);
    EXPECT_EQ(in_first, first);
    EXPECT_EQ(in_second, second);
    EXPECT_EQ(in_other, other);
  };
  runRanks(2, body, tcp);
}

TEST(HeldMessages, ALaterReceiveOfTheTagDoesNotTakeTheMessageOfAHeldOne) {
  for (const size_t numel : {size_t{1}, size_t{300000}}) { // eager, and with credit
    const auto body = [&](Rank& self) {
      std::vector<float> first(numel, 1);
      std::vector<float> second(numel, 2);
      if (self.rank == 0) {
        const auto a = message(self, Collective::Send, 7, first, false);
        const auto b = message(self, Collective::Send, 7, second, false);
        expectDone(a);
        expectDone(b);
        return;
      }
      std::vector<float> in_first(numel);
      std::vector<float> in_second(numel);
      const auto a = message(self, Collective::Recv, 7, in_first, true);
      const auto b = message(self, Collective::Recv, 7, in_second, false);
      expectDone(b);
      EXPECT_FALSE(a->done());
      EXPECT_EQ(in_first, std::vector<float>(numel)) << "its memory may still be in use";
      self.group.release(a);
      expectDone(a);
      EXPECT_EQ(in_first, first);
      EXPECT_EQ(in_second, second);
    };
    runRanks(2, body, tcp);
  }
}

// Of two devices, whose copies end in any order. The oracle: under each tag the k-th send belongs to the k-th receive.
TEST(HeldMessages, ReleasedInAnyOrderTheyKeepTheirs) {
  constexpr int kSeeds = 30;
  constexpr size_t kCount = 40;
  for (int seed = 0; seed < kSeeds; ++seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    std::vector<uint32_t> tags(kCount);
    std::vector<size_t> numels(kCount);
    for (size_t i = 0; i < kCount; ++i) {
      tags[i] = random() % 3;
      numels[i] = random() % 4 == 0 ? 40000 : 5; // of one length per tag, so that nothing but the values shows a swap
    }
    for (size_t i = 0; i < kCount; ++i) {
      numels[i] = numels[tags[i]];
    }
    const auto body = [&](Rank& self) {
      const bool sends = self.rank == 0;
      std::mt19937 own(static_cast<uint32_t>(seed * 2 + self.rank + 1000));
      std::vector<std::vector<float>> values;
      std::vector<std::shared_ptr<Operation>> operations;
      std::vector<std::shared_ptr<Operation>> held;
      for (size_t i = 0; i < kCount; ++i) {
        values.emplace_back(numels[i], sends ? static_cast<float>(i + 1) : -1.0F);
      }
      const auto releaseOne = [&] {
        const auto at = held.begin() + static_cast<std::ptrdiff_t>(own() % held.size());
        self.group.release(*at);
        held.erase(at);
      };
      for (size_t i = 0; i < kCount; ++i) {
        const bool is_held = own() % 2 == 0;
        operations.push_back(message(self, sends ? Collective::Send : Collective::Recv, tags[i], values[i], is_held));
        if (is_held) {
          held.push_back(operations.back());
        }
        if (!held.empty() && own() % 4 == 0) {
          releaseOne();
        }
      }
      while (!held.empty()) {
        if (own() % 5 == 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(own() % 4)); // receives ask after 2 ms
        }
        releaseOne();
      }
      for (size_t i = 0; i < kCount; ++i) {
        expectDone(operations[i]);
        ASSERT_EQ(values[i], std::vector<float>(numels[i], static_cast<float>(i + 1))) << "seed " << seed << " #" << i;
      }
    };
    runRanks(2, body, tcp);
    if (HasFailure()) {
      return;
    }
  }
}

// Nobody waits for a peer that is ready: the error names the rank whose device is late.
TEST(HeldMessages, OneBehindAHeldOneNamesItsOwnDeviceAtTheDeadline) {
  const auto body = [&](Rank& self) {
    std::vector<float> first{1};
    std::vector<float> second{2};
    if (self.rank == 0) {
      const auto a = message(self, Collective::Send, 7, first, true);
      const auto b = message(self, Collective::Send, 7, second, false, 300);
      ASSERT_TRUE(self.group.wait(*b, Deadline::after(20000)));
      const auto error = b->error();
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code, ErrorCode::Timeout) << error->text();
      EXPECT_EQ(error->peer, 0) << error->text();
      EXPECT_NE(error->summary.find("has not left its device"), std::string::npos) << error->text();
      ASSERT_TRUE(self.group.wait(*a, Deadline::after(20000)));
      self.group.release(a); // in vain
      return;
    }
    const auto a = message(self, Collective::Recv, 7, first, false);
    ASSERT_TRUE(self.group.wait(*a, Deadline::after(20000)));
    EXPECT_TRUE(a->error());
  };
  runRanks(2, body, tcp);
}

TEST(HeldMessages, ClosingEndsThem) {
  const auto body = [](Rank& self) {
    std::vector<float> values{1};
    const auto operation = message(self, self.rank == 0 ? Collective::Send : Collective::Recv, 7, values, true);
    self.group.close();
    ASSERT_TRUE(self.group.wait(*operation, Deadline::after(20000)));
    EXPECT_TRUE(operation->error());
    self.group.release(operation);
  };
  runRanks(2, body, tcp);
}

} // namespace
} // namespace pycomm::testing
