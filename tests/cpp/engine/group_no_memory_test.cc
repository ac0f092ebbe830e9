// A native thread that gets no memory ends what it does with a typed error, and never the process.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <future>

#include "allocations.h"
#include "base/fault_point.h"
#include "ranks.h"
#include "transport/directory_store.h"
#include "transport/process.h"
#include "within.h"

namespace pycomm::testing {
namespace {

enum class Event { Close, Abort, PeerLeaves };

/// What rank 0 has under way, and rank 1 never enters.
std::vector<std::shared_ptr<Operation>> startAlone(Rank& self, std::vector<std::vector<float>>& memory) {
  std::vector<std::shared_ptr<Operation>> started;
  for (const Collective kind :
       {Collective::AllReduce, Collective::Recv, Collective::Broadcast, Collective::AllReduce}) {
    Group::Call call = allReduceCall(memory.emplace_back(30000));
    call.schedule.kind = kind;
    call.schedule.reduce_op = kind == Collective::AllReduce ? ReduceOp::Sum : ReduceOp::None;
    call.schedule.root = call.peer = 1;
    if (memory.size() < 4) {
      call.schedule.algorithm = kind == Collective::Recv ? Algorithm::Auto : Algorithm::Ring; // over links
    }
    started.push_back(self.group.start(call));
  }
  return started;
}

/// How many of these failed: the `nth` allocation that the loop makes once that event has begun, and the `second` one after it.
int endsTyped(Event event, bool on_data_loop, int64_t nth, int64_t second = 0) {
  int strikes = 0;
  std::promise<void> ended;
  std::shared_future<void> has_ended = ended.get_future().share();
  std::promise<void> under_way;
  std::shared_future<void> is_under_way = under_way.get_future().share();
  runRanks(2, [&](Rank& self) {
    if (self.rank == 1) {
      is_under_way.wait();
      if (event == Event::PeerLeaves) {
        self.group.close();
      }
      has_ended.wait();
      return;
    }
    std::vector<std::vector<float>> memory;
    memory.reserve(4);
    const auto operations = startAlone(self, memory);
    EventLoop& loop = on_data_loop ? self.engine.dataLoop() : self.engine.control();
    loop.run([&] { failAllocation(nth, second); });
    under_way.set_value();
    if (event == Event::Close) {
      self.group.close();
    } else if (event == Event::Abort) {
      ErrorRecord reason;
      reason.code = ErrorCode::Aborted;
      reason.summary = "a test gave up, for a reason that takes more than a few letters to tell";
      self.group.abort(reason);
    }
    for (const auto& operation : operations) {
      EXPECT_TRUE(operation->wait(Deadline::after(60000))) << operation->label() << ", allocation " << nth;
      const auto error = operation->error();
      EXPECT_TRUE(error);
      if (!error) {
        continue;
      }
      const ErrorCode expected[] = {
          ErrorCode::PeerLeft, ErrorCode::Aborted, ErrorCode::PeerLeft}; // also if it is this rank
      EXPECT_TRUE(
          error->code == expected[static_cast<int>(event)] || error->code == ErrorCode::OutOfMemory ||
          (event == Event::Close && error->code == ErrorCode::ShutDown))
          << error->text();
      EXPECT_FALSE(error->summary.empty());
    }
    loop.run([&] {
      strikes = failedAllocations();
      failAllocation(0);
    });
    ended.set_value();
  });
  return strikes;
}

// The first, the second, … allocation fails, until the event needs none of that number.
void failEachAllocation(Event event, bool on_data_loop) {
  int strikes = 0;
  int64_t nth = 1;
  for (int without = 0; without < 3 && nth < 200; nth += 1 + nth / 12) { // the heartbeat's may be among them
    const bool struck = endsTyped(event, on_data_loop, nth) > 0;
    strikes += struck ? 1 : 0;
    without = struck ? 0 : without + 1;
    if (::testing::Test::HasFailure()) {
      FAIL() << "allocation " << nth;
    }
  }
  EXPECT_GE(strikes, 10) << "nearly nothing allocates there";
}

TEST(NoMemory, WhileTheGroupIsClosed) {
  failEachAllocation(Event::Close, true);
  failEachAllocation(Event::Close, false);
}

// Nobody could close it again, and its destructor must not throw.
TEST(NoMemory, OfTheThreadThatClosesTheGroup) {
  bool struck = true;
  for (int64_t nth = 1; struck && nth < 100; ++nth) {
    runRanks(2, [&](Rank& self) {
      if (self.rank == 1) {
        return;
      }
      std::vector<std::vector<float>> memory;
      memory.reserve(4);
      const auto operations = startAlone(self, memory);
      failAllocation(nth);
      EXPECT_NO_THROW(self.group.close()) << "allocation " << nth;
      struck = allocationFailed();
      failAllocation(0);
      for (const auto& operation : operations) {
        EXPECT_TRUE(operation->done()) << operation->label() << ", allocation " << nth;
      }
    });
    if (::testing::Test::HasFailure()) {
      FAIL() << "allocation " << nth;
    }
  }
  EXPECT_FALSE(struck);
}

TEST(NoMemory, WhileTheGroupFails) {
  failEachAllocation(Event::Abort, true);
  failEachAllocation(Event::Abort, false);
}

// Nor is there any to report that.
TEST(NoMemory, WhileTheControlLoopReportsThat) {
  int strikes_of_two = 0;
  for (int64_t nth = 1; nth <= 3; ++nth) {
    for (int64_t second = 1; second <= 10; ++second) {
      strikes_of_two += endsTyped(Event::Abort, false, nth, second) == 2 ? 1 : 0;
      if (::testing::Test::HasFailure()) {
        FAIL() << "allocations " << nth << " and " << nth + second;
      }
    }
  }
  EXPECT_GE(strikes_of_two, 10);
}

TEST(NoMemory, WhileAPeerLeaves) {
  failEachAllocation(Event::PeerLeaves, true);
  failEachAllocation(Event::PeerLeaves, false);
}

// An operation in shared memory that was reported to the data loop, because it waited for long, ends.
TEST(NoMemory, WhileAnOperationThatWaitedGoesOn) {
  for (int64_t nth = 1; nth <= 6; ++nth) {
    std::promise<void> waited_long;
    std::shared_future<void> has_waited_long = waited_long.get_future().share();
    runRanks(2, [&](Rank& self) {
      std::vector<float> values(100, 1.0F);
      EventLoop& data_loop = self.engine.dataLoop();
      if (self.rank == 0) {
        data_loop.run([&] { failAllocation(nth); });
      } else {
        has_waited_long.wait();
      }
      const auto operation = self.group.start(allReduceCall(values));
      bool struck = false;
      if (self.rank == 0) {
        // The plane notifies the data loop after 50 ms, which asks all ranks after 200 ms.
        for (const Deadline most = Deadline::after(60000); !struck && !most.expired();) {
          data_loop.run([&] { struck = allocationFailed(); });
        }
        waited_long.set_value();
      }
      ASSERT_TRUE(operation->wait(Deadline::after(60000)));
      const auto error = operation->error();
      EXPECT_TRUE(!error || error->code == ErrorCode::OutOfMemory) << error->text();
      if (self.rank == 0) {
        data_loop.run([&] { failAllocation(0); });
        EXPECT_TRUE(struck) << "the data loop makes no allocation " << nth;
      }
    });
  }
}

// Its id may be taken by then: either nothing has happened, or the group fails on all ranks, and none waits for its deadline.
/// `second`: how long after the first another allocation fails, see failAllocation(). How often that one did.
int issueWithoutMemory(Algorithm algorithm, int64_t second = 0) {
  int strikes = 0;
  int second_strikes = 0;
  for (int64_t nth = 1; nth <= 24; ++nth) {
    runRanks(2, [&](Rank& self) {
      std::vector<float> first(100, 1.0F);
      std::vector<float> values(100, self.rank == 0 ? 1.0F : 10.0F);
      Group::Call call = allReduceCall(first, Deadline::after(120000));
      Group::Call again = allReduceCall(values, Deadline::after(120000));
      call.schedule.algorithm = again.schedule.algorithm = algorithm;
      bool issued = true;
      if (self.rank == 0) {
        failAllocation(nth, second);
        try {
          (void)self.group.start(call);
        } catch (const std::exception&) {
          ++strikes;
          issued = false;
        }
        second_strikes += failedAllocations() == 2 ? 1 : 0;
        failAllocation(0);
      } else {
        (void)self.group.start(call);
      }
      try {
        const auto next = self.group.start(again);
        EXPECT_TRUE(self.group.wait(*next, Deadline::after(20000))) << "allocation " << nth;
        if (const auto error = next->error()) {
          EXPECT_TRUE(error->code == ErrorCode::OutOfMemory || error->code == ErrorCode::PeerLeft) << error->text();
        } else { // what has met what
          EXPECT_EQ(values.front(), issued ? 11.0F : 2.0F) << "allocation " << nth;
        }
      } catch (const Error& error) { // the group has failed
        EXPECT_EQ(error.record().code, ErrorCode::OutOfMemory) << error.record().text();
      }
    });
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "allocation " << nth;
      return second_strikes;
    }
  }
  EXPECT_GE(strikes, 3);
  return second_strikes;
}

TEST(NoMemory, WhileAnOperationInSharedMemoryIsIssued) {
  static_cast<void>(issueWithoutMemory(Algorithm::Auto));
}

TEST(NoMemory, WhileAnOperationOverLinksIsIssued) {
  static_cast<void>(issueWithoutMemory(Algorithm::Ring));
}

// Nor is there any to say so.
TEST(NoMemory, WhileThatFailsTheGroup) {
  int strikes = 0;
  for (int64_t second = 1; second <= 8 && !::testing::Test::HasFailure(); ++second) {
    SCOPED_TRACE(second);
    strikes += issueWithoutMemory(Algorithm::Ring, second);
  }
  EXPECT_GE(strikes, 10);
}

TEST(NoMemory, OfTheThreadThatAbortsTheGroup) {
  bool struck = true;
  for (int64_t nth = 1; struck && nth < 100; ++nth) {
    std::array<ErrorCode, 2>
        codes{}; // compared when both have ended: rank 1's operation may end before abort() returns
    runRanks(2, [&](Rank& self) {
      std::vector<float> values(100, 1.0F);
      Group::Call call = allReduceCall(values, Deadline::after(120000));
      call.held = true;
      const auto operation = self.group.start(call);
      if (self.rank == 0) {
        ErrorRecord reason;
        reason.code = ErrorCode::Aborted;
        reason.summary = "a test gave up, for a reason that takes more than a few letters to tell";
        failAllocation(nth);
        EXPECT_NO_THROW(self.group.abort(reason));
        struck = allocationFailed();
        failAllocation(0);
      }
      EXPECT_TRUE(operation->wait(Deadline::after(20000))) << "allocation " << nth;
      const auto error = operation->error();
      ASSERT_TRUE(error);
      codes[static_cast<size_t>(self.rank)] = error->code;
    });
    const ErrorCode expected = struck ? ErrorCode::OutOfMemory : ErrorCode::Aborted;
    EXPECT_EQ(codes, (std::array<ErrorCode, 2>{expected, expected})) << "allocation " << nth;
    if (::testing::Test::HasFailure()) {
      FAIL() << "allocation " << nth;
    }
  }
  EXPECT_FALSE(struck);
}

/// An event loop that stands still. Its queue has no room left, so the next task needs memory.
class FullLoop {
 public:
  explicit FullLoop(EventLoop& loop) {
    std::promise<void> stands;
    loop.post([&stands, goes_on = goes_on_.get_future().share()]() noexcept {
      stands.set_value();
      goes_on.wait();
    });
    stands.get_future().wait();
    while (!throwsWithoutMemory(1, [&] { loop.postQuietly([] {}); })) {
    }
  }
  ~FullLoop() {
    goes_on_.set_value();
  }
  FullLoop(const FullLoop&) = delete;
  FullLoop& operator=(const FullLoop&) = delete;

 private:
  std::promise<void> goes_on_;
};

TEST(NoMemory, WhileAnOperationIsReleased) {
  runRanks(2, [](Rank& self) {
    std::vector<float> values(100, 1.0F);
    Group::Call call = allReduceCall(values, Deadline::after(120000));
    call.schedule.algorithm = Algorithm::Ring;
    call.held = self.rank == 0;
    const auto operation = self.group.start(call);
    if (self.rank == 0) {
      const FullLoop full(self.engine.dataLoop());
      EXPECT_TRUE(throwsWithoutMemory(1, [&] { self.group.release(operation); }));
    }
    ASSERT_TRUE(operation->wait(Deadline::after(20000)));
    const auto error = operation->error();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::OutOfMemory) << error->text();
  });
}

// NCCL's thread says that it has ended, and an exception there would end the process.
TEST(NoMemory, WhileAnOperationThatIsFollowedEnds) {
  for (const bool full : {false, true}) {
    runRanks(2, [&](Rank& self) {
      std::vector<float> values(100, 1.0F);
      const auto operation = self.group.follow(allReduceCall(values, Deadline::after(120000)));
      EventLoop& data_loop = self.engine.dataLoop();
      for (int i = 0; i < 2; ++i) { // its queue, which it takes by turns, has room
        for (int j = 0; j < 8; ++j) {
          data_loop.post([] {});
        }
        data_loop.run([] {});
      }
      if (self.rank == 0 || !full) {
        const auto stands = full ? std::make_unique<const FullLoop>(data_loop) : nullptr;
        failAllocation(1);
        EXPECT_NO_THROW(self.group.followedEnded(operation, std::nullopt));
        EXPECT_EQ(allocationFailed(), full);
        failAllocation(0);
      }
      ASSERT_TRUE(operation->wait(Deadline::after(20000)));
      const auto error = operation->error();
      EXPECT_EQ(error.has_value(), full);
      EXPECT_TRUE(!error || error->code == ErrorCode::OutOfMemory) << error->text();
    });
  }
}

TEST(NoMemory, WhileTheDeathOfAPeerIsNoticed) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs a build with fault points";
  }
  for (const char* site : {"control.died", "control.failed"}) {
    DirectoryStore store;
    SharedFlag joined;
    Process victim([&] {
      Engine engine;
      const auto group = Group::join(engine, store, groupConfig(1, 2));
      joined.raise();
      return SharedFlag().wait(60000);
    });
    Engine engine;
    const auto group = Group::join(engine, store, groupConfig(0, 2));
    ASSERT_TRUE(joined.wait());
    std::vector<float> values(100);
    const auto operation = group->start(allReduceCall(values));
    armFaultPoints(std::string(site) + ":1:nomem");
    const TimePoint begin = Clock::now();
    victim.kill();
    EXPECT_TRUE(operation->wait(Deadline::after(60000))) << site;
    EXPECT_EQ(faultPointTallies().front().strikes, 1) << site;
    armFaultPoints("");
    EXPECT_WITHIN_MS(elapsedMs(begin), 5000) << site;
    const auto error = operation->error();
    ASSERT_TRUE(error) << site;
    EXPECT_TRUE(error->code == ErrorCode::OutOfMemory || error->code == ErrorCode::PeerDead) << error->text();
  }
}

// A caller that gets an error may begin the next operation at once. If the group had not failed by then, the other ranks would name that
// operation as the cause.
TEST(NoMemory, AnOperationThatCannotBeginEndsNoSoonerThanItsGroup) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs a build with fault points";
  }
  for (const Transport transport : {Transport::Tcp, Transport::Auto}) {
    for (int repetition = 0; repetition < 20; ++repetition) {
      armFaultPoints("operation.post:1:nomem");
      runRanks(
          3,
          [&](Rank& self) {
            std::vector<float> values(1000);
            const auto operation = self.group.start(allReduceCall(values));
            ASSERT_TRUE(self.group.wait(*operation, Deadline::after(60000)));
            EXPECT_TRUE(self.group.failure());
            for (const auto& error : {operation->error(), self.group.failure()}) {
              ASSERT_TRUE(error);
              EXPECT_EQ(error->code, ErrorCode::OutOfMemory) << error->text();
            }
          },
          [&](Group::Config& config) { config.transport = transport; });
      EXPECT_EQ(faultPointTallies().front().strikes, 1);
      armFaultPoints("");
    }
  }
}

/// Whether this process is connected to the socket at which others watch the process `pid` (LocalPeers).
bool watches(pid_t pid) {
  rlimit most{};
  EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &most), 0);
  for (int fd = 0; fd < static_cast<int>(std::min<rlim_t>(most.rlim_cur, 4096)); ++fd) {
    sockaddr_un remote{};
    socklen_t length = sizeof remote;
    ucred peer{};
    socklen_t peer_nbytes = sizeof peer;
    int type = 0;
    socklen_t type_nbytes = sizeof type;
    const bool named = ::getpeername(fd, reinterpret_cast<sockaddr*>(&remote), &length) == 0 &&
        remote.sun_family == AF_UNIX && length > sizeof remote.sun_family;
    if (named && ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &type_nbytes) == 0 && type == SOCK_SEQPACKET &&
        ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &peer_nbytes) == 0 && peer.pid == pid) {
      return true;
    }
  }
  return false;
}

// The group is gone when its peer dies. Nothing may call it then.
TEST(NoMemory, AGroupThatCouldNotBeMadeWatchesNobody) {
  bool struck = true;
  for (int64_t nth = 1; struck; ++nth) {
    ASSERT_LT(nth, 1000);
    DirectoryStore store;
    SharedFlag tried;
    Process victim([&] {
      Engine engine;
      Group::Config config = groupConfig(1, 2);
      try {
        const auto group = Group::join(engine, store, config);
        group->close();
      } catch (const Error&) {
      }
      tried.raise();
      return SharedFlag().wait(60000);
    });
    Engine engine;
    engine.control().run([&] { failAllocation(nth); });
    bool watched = false;
    try {
      const auto group = Group::join(engine, store, groupConfig(0, 2));
      watched = watches(victim.pid());
      group->close();
    } catch (const Error&) {
    }
    engine.control().run([&] {
      struck = allocationFailed();
      failAllocation(0);
    });
    EXPECT_TRUE(struck || watched);
    EXPECT_FALSE(watches(victim.pid())) << "allocation " << nth;
    ASSERT_TRUE(tried.wait()) << "allocation " << nth;
    victim.kill();
    EXPECT_FALSE(victim.runsOn(5000));
    std::this_thread::sleep_for(std::chrono::milliseconds(5)); // its death is noticed
    engine.control().run([] {});
  }
}

TEST(NoMemory, WhileControlLinksAreClosed) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs a build with fault points";
  }
  armFaultPoints("links.close:1+:nomem");
  runRanks(3, [](Rank& self) {
    const auto barrier = self.group.start(barrierCall());
    ASSERT_TRUE(self.group.wait(*barrier, Deadline::after(20000)));
    self.group.close();
    const auto failure = self.group.failure();
    EXPECT_FALSE(failure) << failure->text();
  });
  EXPECT_GE(faultPointTallies().front().strikes, 3) << "once per rank";
  armFaultPoints("");
}

} // namespace
} // namespace pycomm::testing
