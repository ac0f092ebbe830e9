// Point-to-point between ranks that are threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <future>

#include "engine/data/point_to_point.h"
#include "engine/expect_done.h"
#include "engine/ranks.h"
#include "sanitized.h"
#include "within.h"

namespace pycomm::testing {
namespace {

constexpr int kAny = PointToPoint::kAnyRank;

std::shared_ptr<Operation> message(
    Rank& self,
    Collective kind,
    int peer,
    uint32_t tag,
    std::vector<float>& values,
    int timeout_ms = 20000) {
  Group::Call call;
  call.schedule.kind = kind;
  call.schedule.dtype = DType::Float32;
  call.schedule.numel = static_cast<int64_t>(values.size());
  call.peer = peer;
  call.tag = tag;
  if (kind == Collective::Send) {
    call.input = viewOf(values);
  } else {
    call.output = viewOf(values);
  }
  call.deadline = Deadline::after(timeout_ms);
  return self.group.start(call);
}

/// For tens of thousands of messages, under a sanitizer on a busy machine.
constexpr int kPatientMs = 60000;

std::shared_ptr<Operation> send(Rank& self, int to, uint32_t tag, std::vector<float>& values, int timeout_ms = 20000) {
  return message(self, Collective::Send, to, tag, values, timeout_ms);
}
std::shared_ptr<Operation> receive(
    Rank& self,
    int from,
    uint32_t tag,
    std::vector<float>& into,
    int timeout_ms = 20000) {
  return message(self, Collective::Recv, from, tag, into, timeout_ms);
}

std::vector<float> filled(size_t numel, float start) {
  std::vector<float> values(numel);
  for (size_t i = 0; i < numel; ++i) {
    values[i] = start + static_cast<float>(i % 1009);
  }
  return values;
}

ErrorRecord expectError(const std::shared_ptr<Operation>& operation) {
  EXPECT_TRUE(operation->wait(Deadline::after(20000))) << operation->label();
  const auto error = operation->error();
  EXPECT_TRUE(error) << operation->label() << " succeeded";
  return error ? *error : ErrorRecord();
}

TEST(Messages, EverySize) {
  runRanks(2, [](Rank& self) {
    for (const size_t numel : {size_t{0}, size_t{1}, size_t{1000}, size_t{16384}, size_t{16385}, size_t{3000001}}) {
      std::vector<float> values = self.rank == 0 ? filled(numel, 5) : std::vector<float>(numel);
      expectDone(self.rank == 0 ? send(self, 1, 0, values) : receive(self, 0, 0, values));
      EXPECT_EQ(values, filled(numel, 5));
    }
  });
}

TEST(Messages, TagsInAnyOrderAndManyUnexpected) {
  constexpr int kCount = 300;
  runRanks(2, [](Rank& self) {
    std::vector<std::vector<float>> values;
    std::vector<std::shared_ptr<Operation>> operations;
    for (int k = 0; k < kCount; ++k) {
      values.push_back(filled(static_cast<size_t>(k * 131 % 40000), static_cast<float>(k)));
    }
    const auto expected = values;
    for (int k = 0; k < kCount; ++k) {
      if (self.rank == 0) {
        operations.push_back(send(self, 1, static_cast<uint32_t>(k), values[static_cast<size_t>(k)]));
      } else {
        const auto at = static_cast<size_t>(kCount - 1 - k);
        std::fill(values[at].begin(), values[at].end(), -1.0F);
        operations.push_back(receive(self, 0, static_cast<uint32_t>(at), values[at]));
      }
    }
    for (const auto& operation : operations) {
      expectDone(operation);
    }
    EXPECT_EQ(values, expected);
  });
}

TEST(Messages, OneTagKeepsItsOrder) {
  runRanks(2, [](Rank& self) {
    // The first is too large to go eagerly, the second is small and could overtake it.
    std::vector<float> first = filled(500000, 1);
    std::vector<float> second = filled(500, 2);
    if (self.rank == 0) {
      const auto a = send(self, 1, 4, first);
      const auto b = send(self, 1, 4, second);
      expectDone(a);
      expectDone(b);
      return;
    }
    std::vector<float> got_first(first.size());
    std::vector<float> got_second(second.size());
    expectDone(receive(self, kAny, 4, got_first));
    expectDone(receive(self, kAny, 4, got_second));
    EXPECT_EQ(got_first, first);
    EXPECT_EQ(got_second, second);
  });
}

TEST(Messages, FromAnyRankEachOnce) {
  runRanks(4, [](Rank& self) {
    constexpr int kEach = 20;
    if (self.rank != 0) {
      std::vector<std::vector<float>> values;
      std::vector<std::shared_ptr<Operation>> sends;
      for (int k = 0; k < kEach; ++k) {
        values.push_back(filled(k % 2 == 0 ? 10 : 50000, static_cast<float>(self.rank * 100 + k)));
        sends.push_back(send(self, 0, static_cast<uint32_t>(k % 2), values.back()));
      }
      for (const auto& operation : sends) {
        expectDone(operation);
      }
      return;
    }
    std::vector<int> count(4, 0);
    for (int k = 0; k < 3 * kEach; ++k) {
      // Small and large alternate per sender; taken tag by tag.
      const bool small = k < 3 * kEach / 2;
      std::vector<float> got(small ? 10 : 50000);
      const auto operation = receive(self, kAny, small ? 0 : 1, got);
      expectDone(operation);
      const int from = operation->request().descriptor.root;
      ASSERT_GE(from, 1);
      const int n = count[static_cast<size_t>(from)]++;
      const int index = small ? 2 * n : 2 * (n - kEach / 2) + 1;
      EXPECT_EQ(got, filled(got.size(), static_cast<float>(from * 100 + index)));
    }
    EXPECT_EQ(count, (std::vector<int>{0, kEach, kEach, kEach}));
  });
}

TEST(Messages, ToOneself) {
  for (const int size : {1, 2}) {
    runRanks(size, [](Rank& self) {
      for (const size_t numel : {size_t{0}, size_t{1}, size_t{1000000}}) {
        for (const int from : {self.rank, kAny}) {
          std::vector<float> out = filled(numel, 3);
          std::vector<float> in(numel, -1.0F);
          std::vector<float> back(numel, -1.0F);
          const auto sent = send(self, self.rank, 9, out);
          const auto again =
              send(self, self.rank, 9, in); // its bytes are read only once its receive is posted, or eagerly now
          expectDone(receive(self, from, 9, back));
          expectDone(sent);
          EXPECT_EQ(back, out);
          expectDone(receive(self, from, 9, back));
          expectDone(again);
          EXPECT_EQ(back, std::vector<float>(numel, -1.0F));
        }
      }
    });
  }
}

// A receive that has waited for 2 ms asks for its message, here this rank itself.
TEST(Messages, ToOneselfLongAfterTheReceive) {
  for (const int size : {1, 2}) {
    runRanks(size, [](Rank& self) {
      for (const size_t numel : {size_t{0}, size_t{3}, size_t{400000}}) {
        for (const int from : {self.rank, kAny}) {
          std::vector<float> out = filled(numel, 3);
          std::vector<float> in(numel, -1.0F);
          const auto received = receive(self, from, 9, in);
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          expectDone(send(self, self.rank, 9, out));
          expectDone(received);
          EXPECT_EQ(in, out);
        }
      }
    });
  }
}

TEST(Messages, AmongCollectives) {
  runRanks(3, [](Rank& self) {
    for (int round = 0; round < 20; ++round) {
      std::vector<float> ring_out = filled(20000, static_cast<float>(self.rank));
      std::vector<float> ring_in(20000);
      std::vector<float> sum(1000, 1.0F);
      const auto in = receive(self, (self.rank + 2) % 3, 1, ring_in);
      const auto all = self.group.start(allReduceCall(sum));
      const auto out = send(self, (self.rank + 1) % 3, 1, ring_out);
      expectDone(all);
      expectDone(in);
      expectDone(out);
      EXPECT_EQ(sum, std::vector<float>(1000, 3.0F));
      EXPECT_EQ(ring_in, filled(20000, static_cast<float>((self.rank + 2) % 3)));
    }
  });
}

TEST(Messages, DifferentLengthsAreAMismatch) {
  runRanks(2, [](Rank& self) {
    std::vector<float> values(self.rank == 0 ? 10 : 11);
    std::vector<float> sum(4);
    if (self.rank == 0) {
      // A small send ends when its bytes are gone, and the receiver finds out; where they take longer than 2 ms the receiver has asked
      // for them, and the sender finds out.
      const auto sent = send(self, 1, 2, values);
      EXPECT_TRUE(sent->wait(Deadline::after(20000)));
      if (const auto error = sent->error()) {
        EXPECT_EQ(error->code, ErrorCode::CollectiveMismatch) << error->text();
      }
      expectError(self.group.start(allReduceCall(sum)));
      return;
    }
    const ErrorRecord error = expectError(receive(self, 0, 2, values));
    EXPECT_EQ(error.code, ErrorCode::CollectiveMismatch) << error.text();
    EXPECT_NE(error.summary.find("send(float32 x 10, to rank 1, tag 2)"), std::string::npos) << error.text();
    EXPECT_NE(error.summary.find("recv(float32 x 11, from rank 0, tag 2)"), std::string::npos) << error.text();
  });
}

TEST(Messages, NobodySends) {
  runRanks(2, [](Rank& self) {
    std::vector<float> values(4);
    if (self.rank == 0) {
      const ErrorRecord error = expectError(receive(self, kAny, 5, values, 300));
      EXPECT_EQ(error.code, ErrorCode::Timeout);
      EXPECT_EQ(error.op, "recv");
      EXPECT_NE(error.summary.find("recv from any rank (tag 5)"), std::string::npos) << error.text();
      EXPECT_NE(error.summary.find("no rank has sent"), std::string::npos) << error.text();
      return;
    }
    std::vector<float> sum(4);
    expectError(self.group.start(allReduceCall(sum))); // the group has failed as a whole
  });
}

TEST(Messages, ALateSenderIsNamed) {
  runRanks(2, [](Rank& self) {
    std::vector<float> values(4);
    if (self.rank == 0) {
      const ErrorRecord error = expectError(receive(self, 1, 5, values, 400));
      EXPECT_EQ(error.code, ErrorCode::Timeout);
      EXPECT_EQ(error.peer, 1);
      EXPECT_NE(error.summary.find("rank 1"), std::string::npos) << error.text();
      return;
    }
    std::vector<float> sum(4);
    expectError(self.group.start(allReduceCall(sum)));
  });
}

// The goodbye comes on the control link; the message is on its way on the bulk link, and is read later.
TEST(Messages, AGoodbyeThatOvertakesAMessageDoesNotEndItsReceiveFromAnyRank) {
  std::promise<void> blocked;
  std::shared_future<void> is_blocked = blocked.get_future().share();
  std::promise<void> left;
  std::shared_future<void> has_left = left.get_future().share();
  const auto body = [&](Rank& self) {
    std::vector<float> values(10, 3.0F);
    if (self.rank == 1) {
      expectDone(send(self, 0, 0, values)); // opens the link
      is_blocked.wait();
      expectDone(send(self, 0, 0, values));
      self.group.close();
      left.set_value();
      return;
    }
    expectDone(receive(self, kAny, 0, values));
    std::vector<float> into(10);
    const auto last = receive(self, kAny, 0, into);
    self.engine.dataLoop().post([&] {
      blocked.set_value();
      has_left.wait();
      for (int k = 0; k < 2; ++k) { // it reads the goodbye, and has the data loop told of it
        self.engine.control().run([] {});
      }
      self.engine.dataLoop().post([&] { // behind that: a rank that blames its sender now fails before it reads
        for (const Deadline most = Deadline::after(200); !self.group.failure() && !most.expired();) {
          std::this_thread::yield();
        }
      });
    });
    ASSERT_TRUE(self.group.wait(
        *last, Deadline::after(20000))); // this thread runs the data loop: tasks come before descriptors
    const auto error = last->error();
    ASSERT_FALSE(error) << error->text();
    EXPECT_EQ(into, values);
    const auto failure = self.group.failure();
    EXPECT_FALSE(failure) << failure->text();
  };
  runRanks(2, body, [](Group::Config& config) { config.transport = Transport::Tcp; });
}

TEST(Messages, ASenderThatLeavesEndsAReceiveFromAny) {
  runRanks(2, [](Rank& self) {
    if (self.rank == 1) {
      return; // closes
    }
    std::vector<float> values(4);
    const ErrorRecord error = expectError(receive(self, kAny, 5, values));
    EXPECT_EQ(error.code, ErrorCode::PeerLeft);
    EXPECT_EQ(error.peer, 1);
  });
}

constexpr Transport kTransports[] = {Transport::SharedMemory, Transport::Tcp};

std::function<void(Group::Config&)> over(Transport transport) {
  return [transport](Group::Config& config) { config.transport = transport; };
}

/// Messages of one number each, so that every value tells which message it was.
struct Numbers {
  explicit Numbers(size_t count, size_t numel = 1) : values(count, std::vector<float>(numel, -1)) {}
  void count() {
    for (size_t i = 0; i < values.size(); ++i) {
      std::fill(values[i].begin(), values[i].end(), static_cast<float>(i));
    }
  }
  void expectCounted() const {
    for (size_t i = 0; i < values.size(); ++i) {
      for (const float value : values[i]) {
        ASSERT_EQ(value, static_cast<float>(i));
      }
    }
  }
  std::vector<std::vector<float>> values;
};

class FarAhead : public ::testing::TestWithParam<Transport> {};

// More than fit their receiver's pool, and more than 65,536. Neither rank receives before all sends of both have been issued.
TEST_P(FarAhead, BothRanksSendBeforeTheyReceive) {
  for (const size_t numel : {size_t{0}, size_t{1}}) {
    constexpr size_t kCount = testing::kFewerSizes ? 30000 : 70000; // more than the pool's 24,592 places
    std::atomic<int> issued{0};
    const TimePoint began = Clock::now();
    runRanks(
        2,
        [&](Rank& self) {
          Numbers out(kCount, numel);
          Numbers in(kCount, numel);
          out.count();
          std::vector<std::shared_ptr<Operation>> operations;
          for (auto& values : out.values) {
            operations.push_back(send(self, 1 - self.rank, 0, values, 60000));
          }
          ++issued;
          while (issued < 2) {
            std::this_thread::yield();
          }
          for (auto& values : in.values) {
            operations.push_back(receive(self, 1 - self.rank, 0, values, 60000));
          }
          for (const auto& operation : operations) {
            ASSERT_TRUE(operation->wait(Deadline::after(60000)));
            ASSERT_FALSE(operation->error()) << operation->error()->text();
          }
          in.expectCounted();
        },
        over(GetParam()));
    EXPECT_WITHIN_MS(elapsedMs(began), 60000);
  }
}

// As many receives before the first send.
TEST_P(FarAhead, TheReceiverIsFarAhead) {
  constexpr size_t kCount = testing::kFewerSizes ? 30000 : 70000; // more than the pool's 24,592 places
  std::atomic<bool> posted{false};
  runRanks(
      2,
      [&](Rank& self) {
        Numbers numbers(kCount);
        std::vector<std::shared_ptr<Operation>> operations;
        if (self.rank == 0) {
          numbers.count();
          while (!posted) {
            std::this_thread::yield();
          }
        }
        for (auto& values : numbers.values) {
          operations.push_back(self.rank == 0 ? send(self, 1, 0, values, 60000) : receive(self, 0, 0, values, 60000));
        }
        posted = true;
        for (const auto& operation : operations) {
          ASSERT_TRUE(operation->wait(Deadline::after(60000)));
          ASSERT_FALSE(operation->error()) << operation->error()->text();
        }
        numbers.expectCounted();
      },
      over(GetParam()));
}

// The pool is full of messages that are received last; those that are wanted first are behind them at the sender. MPI's rule of
// progress: a send and its receive that are both under way get on, whatever else waits.
TEST_P(FarAhead, WhatIsWantedFirstIsBehindAPoolOfOthers) {
  constexpr size_t kCount = 20000;
  constexpr size_t kWanted = 200;
  const TimePoint began = Clock::now();
  runRanks(
      2,
      [&](Rank& self) {
        Numbers others(kCount);
        Numbers wanted(kWanted);
        std::vector<std::shared_ptr<Operation>> operations;
        if (self.rank == 0) {
          others.count();
          wanted.count();
          for (auto& values : others.values) {
            operations.push_back(send(self, 1, 1, values, kPatientMs));
          }
          for (auto& values : wanted.values) {
            operations.push_back(send(self, 1, 2, values, kPatientMs));
          }
        } else {
          for (size_t i = 0; i < kWanted; ++i) {
            expectDone(receive(self, i % 2 == 0 ? 0 : kAny, 2, wanted.values[i]));
          }
          for (auto& values : others.values) {
            operations.push_back(receive(self, 0, 1, values, kPatientMs));
          }
        }
        for (const auto& operation : operations) {
          expectDone(operation, kPatientMs);
        }
        wanted.expectCounted();
        others.expectCounted();
      },
      over(GetParam()));
  EXPECT_WITHIN_MS(elapsedMs(began), 20000);
}

// The pool is full, and both sides are ready for each further message: none of them waits for a pause of an earlier receive. Each third
// receive is long before its send, each third send is long before its receive.
TEST_P(FarAhead, EachOfManyMessagesPassesAFullPoolSoon) {
  constexpr size_t kCount = 20000;
  constexpr size_t kWanted = 24;
  std::atomic<size_t> sending{0};
  std::atomic<size_t> receiving{0};
  runRanks(
      2,
      [&](Rank& self) {
        Numbers others(kCount);
        Numbers wanted(kWanted);
        std::vector<float> never(1);
        std::vector<std::shared_ptr<Operation>> operations;
        std::vector<int64_t> took_ms;
        if (self.rank == 0) {
          others.count();
          wanted.count();
          for (auto& values : others.values) {
            operations.push_back(send(self, 1, 0, values, kPatientMs));
          }
        }
        const std::shared_ptr<Operation> last = self.rank == 1 ? receive(self, kAny, 3, never, kPatientMs) : nullptr;
        for (size_t i = 0; i < kWanted; ++i) {
          std::atomic<size_t>& mine = self.rank == 0 ? sending : receiving;
          const std::atomic<size_t>& other = self.rank == 0 ? receiving : sending;
          if (i % 3 == (self.rank == 0 ? 1U : 2U)) { // the other one is early
            while (other <= i) {
              std::this_thread::yield();
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
          }
          const auto operation =
              self.rank == 0 ? send(self, 1, 1, wanted.values[i]) : receive(self, 0, 1, wanted.values[i]);
          mine = i + 1;
          while (other <= i) {
            std::this_thread::yield();
          }
          const TimePoint both = Clock::now();
          expectDone(operation);
          took_ms.push_back(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - both).count());
        }
        if (self.rank == 0) {
          operations.push_back(send(self, 1, 3, never));
        } else {
          expectDone(last);
          wanted.expectCounted();
          for (auto& values : others.values) {
            operations.push_back(receive(self, 0, 0, values, kPatientMs));
          }
        }
        for (const auto& operation : operations) {
          expectDone(operation, kPatientMs);
        }
        std::sort(took_ms.begin(), took_ms.end());
        EXPECT_WITHIN_MS(took_ms[kWanted / 2], 60);
        EXPECT_WITHIN_MS(took_ms[kWanted * 3 / 4], 120);
      },
      over(GetParam()));
}

// What a question costs does not depend on how many messages under other tags are queued.
TEST_P(FarAhead, QuestionsDoNotHoldTheSenderUp) {
  constexpr size_t kCount = testing::kFewerSizes ? 60000 : 300000;
  constexpr size_t kTags = 500;
  std::atomic<bool> queued{false};
  std::atomic<bool> asked{false};
  runRanks(
      2,
      [&](Rank& self) {
        std::vector<float> value(1);
        std::vector<std::shared_ptr<Operation>> operations;
        if (self.rank == 1) {
          while (!queued) {
            std::this_thread::yield();
          }
          Numbers in(kTags);
          for (size_t i = 0; i < kTags; ++i) {
            operations.push_back(receive(self, 0, static_cast<uint32_t>(1000 + i), in.values[i]));
          }
          std::this_thread::sleep_for(std::chrono::milliseconds(10)); // by now the first questions have left
          asked = true;
          for (const auto& operation : operations) {
            expectError(operation); // its sender closes the group
          }
          return;
        }
        operations.reserve(kCount);
        for (size_t i = 0; i < kCount; ++i) {
          operations.push_back(send(self, 1, 0, value, 60000));
        }
        queued = true;
        while (!asked) {
          std::this_thread::yield();
        }
        const TimePoint began = Clock::now();
        std::vector<float> back(1);
        expectDone(send(self, 0, 9, value));
        expectDone(receive(self, 0, 9, back));
        EXPECT_WITHIN_MS(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count(), 500);
        self.group.close(); // with the queue: nobody receives what is in it
      },
      over(GetParam()));
}

// What a sender that closes its group has queued is missed by its receiver, which names it.
TEST_P(FarAhead, ASenderThatLeavesWithAQueueIsNamed) {
  runRanks(
      2,
      [&](Rank& self) {
        Numbers numbers(20000);
        if (self.rank == 0) {
          std::vector<std::shared_ptr<Operation>> operations;
          for (auto& values : numbers.values) {
            operations.push_back(send(self, 1, 0, values));
          }
          self.group.close();
          EXPECT_EQ(expectError(operations.back()).code, ErrorCode::ShutDown);
          return;
        }
        const ErrorRecord error = expectError(receive(self, 0, 1, numbers.values.front()));
        EXPECT_EQ(error.code, ErrorCode::PeerLeft);
        EXPECT_EQ(error.peer, 0);
        EXPECT_NE(error.summary.find("closed its process group while"), std::string::npos) << error.text();
      },
      over(GetParam()));
}

// What a rank may announce beyond its bound is what it was asked for and has not brought yet.
TEST_P(FarAhead, QuestionsThatHaveBroughtTheirMessagesCountNoMore) {
  constexpr size_t kCount = 20000;
  std::atomic<bool> looked{false};
  runRanks(
      2,
      [&](Rank& self) {
        Numbers others(kCount);
        Numbers wanted(50);
        std::vector<std::shared_ptr<Operation>> operations;
        const bool sends = self.rank == 0;
        const auto start = [&](uint32_t tag, std::vector<float>& values) {
          return sends ? send(self, 1, tag, values, kPatientMs) : receive(self, 0, tag, values, kPatientMs);
        };
        for (auto& values : sends ? others.values : wanted.values) {
          operations.push_back(start(sends ? 1 : 2, values));
        }
        for (size_t i = 0; !sends && i < operations.size(); ++i) {
          expectDone(operations[i], kPatientMs); // behind the pool: questions bring them
        }
        for (auto& values : sends ? wanted.values : others.values) {
          operations.push_back(start(sends ? 2 : 1, values));
        }
        for (const auto& operation : operations) {
          expectDone(operation, kPatientMs);
        }
        if (sends) {
          while (!looked) { // when it leaves, nothing is asked of it any more
            std::this_thread::yield();
          }
          return;
        }
        size_t asked = self.group.usage().tables.asked;
        for (const Deadline soon = Deadline::after(20000); asked != 0 && !soon.expired();) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          asked = self.group.usage().tables.asked;
        }
        EXPECT_EQ(asked, 0U);
        looked = true;
      },
      over(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Transports, FarAhead, ::testing::ValuesIn(kTransports), [](const auto& info) {
  return info.param == Transport::Tcp ? "Tcp" : "SharedMemory";
});

} // namespace
} // namespace pycomm::testing
