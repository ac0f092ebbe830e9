// What a control link may bring. A broken or foreign peer is the culprit, and nothing that it wrote is used as it came.
#include "engine/monitor/control_plane.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "allocations.h"
#include "base/fault_point.h"
#include "engine/loop/event_loop.h"
#include "engine/operation/issue_context.h"
#include "schedule/step.h"
#include "transport/socket_pairs.h"
#include "within.h"

namespace pycomm::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kPlaneGroup = 7;
constexpr int kSize = 4;

GroupIdentity identity() {
  GroupIdentity identity;
  identity.rank = 1;
  identity.size = kSize;
  identity.name = "test";
  identity.hash = kPlaneGroup;
  for (int rank = 0; rank < kSize; ++rank) {
    identity.hosts.push_back("host" + std::to_string(rank));
  }
  return identity;
}

/// Rank 1 of four, with a control link to rank 0, whose end is the test's.
class Plane {
 public:
  explicit Plane(std::vector<Listener> listeners = {}) : loop_("test") {
    Membership::Config membership;
    membership.rank = 1;
    membership.hosts = identity().hosts;
    membership.neighbours = {0, 2, 3};
    ControlPlane::Events events;
    events.failed = [this](const ErrorRecord& record) {
      if (without_memory) {
        ++untold;
        throw std::bad_alloc();
      }
      ErrorRecord known = record; // first: a promise that is set without memory cannot be set again under TSan
      failed_.set_value(std::move(known));
    };
    events.bulk_link = [this](const Hello&, std::unique_ptr<Link>) {
      if (std::exchange(refuses_next_bulk_link, false)) {
        throw std::bad_alloc();
      }
      ++bulk_links;
    };
    events.left = [](int) {};
    events.asked = [this](int from, const FrameHeader& question) { asked.emplace_back(from, question); };
    asked.reserve(8); // the test's own memory is not lacking
    auto [near, link] = namelessPair();
    peer = std::move(near);
    loop_.run([&] {
      plane_ = std::make_unique<ControlPlane>(identity(), loop_, std::move(listeners), membership, std::move(events));
      plane_->open();
      plane_->adopt(0, std::move(link));
    });
  }
  ~Plane() {
    loop_.run([&] { plane_.reset(); });
    loop_.stop();
  }

  void send(const FrameHeader& header, const std::string& payload = "") {
    FrameHeader head = header;
    head.payload_nbytes = head.payload_nbytes == 0 ? static_cast<uint32_t>(payload.size()) : head.payload_nbytes;
    std::string bytes(reinterpret_cast<const char*>(&head), sizeof head);
    bytes += payload;
    const AbortToken none;
    writeAll(*peer, {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, Deadline::after(5000), none);
  }
  /// What the group has failed with; code Ok if it has not within `timeout_ms`.
  ErrorRecord failure(int timeout_ms = 5000) {
    ErrorRecord none;
    none.code = ErrorCode::Ok;
    return failure_.wait_for(std::chrono::milliseconds(timeout_ms)) == std::future_status::ready ? failure_.get()
                                                                                                 : none;
  }
  /// The report of a failure that rank 0 gets; none within `timeout_ms`.
  std::optional<ErrorRecord> told(int timeout_ms = 5000) {
    const AbortToken none;
    const Deadline deadline = Deadline::after(timeout_ms);
    try {
      for (;;) {
        FrameHeader frame;
        readAll(*peer, {reinterpret_cast<std::byte*>(&frame), sizeof frame}, deadline, none);
        std::string payload(frame.payload_nbytes, ' ');
        readAll(*peer, {reinterpret_cast<std::byte*>(payload.data()), payload.size()}, deadline, none);
        if (frame.type == FrameType::Failure) {
          return ErrorRecord::deserialize(payload, kSize, identity().job);
        }
      }
    } catch (const Error&) {
      return std::nullopt;
    }
  }
  void welcome(int rank, LinkPurpose purpose) {
    Accepted accepted;
    accepted.hello = identity().hello(purpose);
    accepted.hello.rank = rank;
    auto [near, other] = namelessPair();
    accepted.link = std::move(near);
    loop_.run([&] { plane_->welcome(std::move(accepted)); });
  }
  std::vector<int> missing() {
    const AbortToken none;
    return plane_->waitForNeighbours(Deadline::after(0), none);
  }

  /// Adopts `link`, while the `nth` allocation fails; 0: none does. Whether that threw.
  bool adopt(int rank, std::unique_ptr<Link> link, int64_t nth) {
    bool threw = false;
    loop_.run([&] {
      failAllocation(nth);
      try {
        plane_->adopt(rank, std::move(link));
      } catch (const std::bad_alloc&) {
        threw = true;
      }
      struck = allocationFailed();
      failAllocation(0);
    });
    return threw;
  }
  /// As the group's owner does with what is thrown.
  void reportNoMemory() {
    loop_.run([&] { plane_->onThrown(std::make_exception_ptr(std::bad_alloc())); });
  }
  /// Runs on the loop's thread.
  template <typename Body>
  void onLoop(const Body& body) {
    loop_.run([&] { body(); });
  }

  std::unique_ptr<SocketLink> peer;
  std::atomic<bool> without_memory{false}; ///< for a failure's record
  std::atomic<int> untold{0}; ///< how often that was so
  bool struck = false; ///< the allocation that was to fail in adopt() has
  // Of the loop's thread:
  bool refuses_next_bulk_link = false; ///< for want of memory
  int bulk_links = 0;
  std::vector<std::pair<int, FrameHeader>> asked;

 private:
  EventLoop loop_;
  std::unique_ptr<ControlPlane> plane_;
  std::promise<ErrorRecord> failed_;
  std::shared_future<ErrorRecord> failure_ = failed_.get_future().share();
};

FrameHeader header(FrameType type) {
  FrameHeader header;
  header.type = type;
  header.group = kPlaneGroup;
  return header;
}

FrameHeader question(int from, int to) {
  FrameHeader question = header(FrameType::Waiting);
  question.op_id = 5;
  Route{from, to}.writeTo(question);
  return question;
}

ErrorRecord report() {
  ErrorRecord record;
  record.code = ErrorCode::PeerDead;
  record.rank = 0;
  record.peer = 2;
  record.summary = "Rank 2 is gone.";
  return record;
}

TEST(ControlPlane, BelievesAReportOfARankThatExists) {
  Plane plane;
  plane.send(header(FrameType::Heartbeat));
  plane.send(header(FrameType::Failure), report().serialize());
  const ErrorRecord failure = plane.failure();
  EXPECT_EQ(failure.code, ErrorCode::PeerDead);
  EXPECT_EQ(failure.peer, 2);
}

// Nor does it take a core meanwhile.
TEST(ControlPlane, AFailureThatFindsNoMemoryIsToldOnceThereIsSome) {
  Plane plane;
  plane.without_memory = true;
  plane.send(header(FrameType::Failure), report().serialize());
  for (const Deadline deadline = Deadline::after(20000); plane.untold == 0 && !deadline.expired();) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const int before = plane.untold;
  const TimePoint began = Clock::now();
  EXPECT_GE(before, 1);
  EXPECT_EQ(plane.failure(300).code, ErrorCode::Ok);
  EXPECT_LE(plane.untold - before, 4 + elapsedMs(began) / 100); // two per tick, which heartbeats cause, too
  plane.without_memory = false;
  const ErrorRecord failure = plane.failure();
  EXPECT_EQ(failure.code, ErrorCode::PeerDead);
  EXPECT_EQ(failure.peer, 2);
}

TEST(ControlPlane, TheSenderOfAnImpossibleReportIsTheCulprit) {
  const auto changed = [](const std::function<void(ErrorRecord&)>& change) {
    ErrorRecord record = report();
    change(record);
    return record.serialize();
  };
  const std::vector<std::string> reports = {
      "",
      "garbage",
      changed([](ErrorRecord& record) { record.peer = 1000000; }),
      changed([](ErrorRecord& record) { record.peer = kSize; }),
      changed([](ErrorRecord& record) { record.peer = -7; }),
      changed([](ErrorRecord& record) { record.rank = 1000000; }),
      changed([](ErrorRecord& record) { record.code = ErrorCode::Ok; }),
      changed([](ErrorRecord& record) { record.code = static_cast<ErrorCode>(999); })};
  for (size_t i = 0; i < reports.size(); ++i) {
    Plane plane;
    plane.send(header(FrameType::Failure), reports[i]);
    const ErrorRecord failure = plane.failure();
    EXPECT_EQ(failure.code, ErrorCode::ProtocolViolation) << i << ": " << failure.text();
    EXPECT_EQ(failure.rank, 1) << i;
    EXPECT_EQ(failure.peer, 0) << i;
    EXPECT_EQ(failure.peer_host, "host0") << i;
    EXPECT_THAT(failure.summary, HasSubstr("report of a failure")) << i;
  }
}

TEST(ControlPlane, TheSenderOfAFrameThatDoesNotBelongHereIsTheCulprit) {
  FrameHeader other_group = header(FrameType::Heartbeat);
  other_group.group = kPlaneGroup + 1;
  FrameHeader other_epoch = header(FrameType::Heartbeat);
  other_epoch.epoch = 1;
  FrameHeader large = header(FrameType::Failure);
  large.payload_nbytes = ErrorRecord::kMaxSerializedNbytes + 1;
  FrameHeader loaded = header(FrameType::Heartbeat);
  loaded.payload_nbytes = 1;
  FrameHeader of_nobody = header(FrameType::Left);
  of_nobody.root = kSize;
  FrameHeader announcement = question(0, 1);
  announcement.kind = static_cast<uint8_t>(Collective::Send);
  FrameHeader of_nothing = question(0, 1);
  of_nothing.op_id = 0;
  FrameHeader has_no_message = question(0, 2); // a rank that would pass it on finds it, too
  has_no_message.type = FrameType::NotEntered;
  has_no_message.op_id = kAskForMessagesId;
  struct Case {
    FrameHeader header;
    const char* says;
  };
  const std::vector<Case> cases = {
      {other_group, "another group or epoch"},
      {other_epoch, "another group or epoch"},
      {large, "a payload of"},
      {loaded, "a payload of 1 bytes"},
      {question(0, 0), "a question between ranks that do not exist"},
      {question(0, kSize), "a question between ranks that do not exist"},
      {question(kSize, 1), "a question between ranks that do not exist"},
      {of_nobody, "the goodbye of a rank that does not exist"},
      {announcement, "a question that belongs on a bulk link"},
      {of_nothing, "a question that belongs on a bulk link"},
      {has_no_message, "a question that belongs on a bulk link"},
      {header(FrameType::Data), "type 3 on a control link"},
      {header(FrameType::HelloReply), "type 2 on a control link"},
      {header(static_cast<FrameType>(200)), "type 200 on a control link"}};
  for (const Case& one : cases) {
    Plane plane;
    plane.send(one.header);
    const ErrorRecord failure = plane.failure();
    EXPECT_EQ(failure.code, ErrorCode::ProtocolViolation) << one.says << ": " << failure.text();
    EXPECT_EQ(failure.peer, 0) << one.says;
    EXPECT_THAT(failure.summary, HasSubstr(one.says));
  }
}

// In a group of two there is no other way to it, and without a word it would take this rank for a silent one.
TEST(ControlPlane, TheSenderOfWhatNoPycommSendsIsToldSo) {
  FrameHeader no_frame = header(FrameType::Heartbeat);
  no_frame.magic ^= 1U;
  FrameHeader other_group = header(FrameType::Heartbeat);
  other_group.group = kPlaneGroup + 1;
  for (const FrameHeader& bad : {no_frame, other_group}) {
    Plane plane;
    plane.send(bad);
    plane.send(header(FrameType::Goodbye)); // no longer read
    EXPECT_EQ(plane.failure().code, ErrorCode::ProtocolViolation);
    const std::optional<ErrorRecord> told = plane.told();
    ASSERT_TRUE(told);
    EXPECT_EQ(told->code, ErrorCode::ProtocolViolation) << told->text();
    EXPECT_EQ(told->rank, 1);
    EXPECT_EQ(told->peer, 0);
  }
}

// Each allocation of the loop fails once. Its sender is not to blame, and what came with it is read, although the kernel has no more of it
// that would wake the loop.
TEST(ControlPlane, AReportThatFindsNoMemoryIsNobodyElsesFault) {
  bool struck = true;
  int64_t nth = 1;
  for (; struck; ++nth) {
    ASSERT_LT(nth, 1000);
    Plane plane;
    plane.onLoop([&] {
      plane.send(header(FrameType::Failure), report().serialize());
      plane.send(question(3, 1));
      failAllocation(nth);
    });
    size_t asked = 0;
    for (const Deadline soon = Deadline::after(20000); asked == 0 && !soon.expired();) {
      plane.onLoop([&] { asked = plane.asked.size(); });
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_EQ(asked, 1U) << "allocation " << nth << ": " << plane.failure(0).text();
    const ErrorRecord failure = plane.failure();
    plane.onLoop([&] {
      struck = allocationFailed();
      failAllocation(0);
    });
    const ErrorRecord sent = report();
    const bool own = struck && failure.code == ErrorCode::OutOfMemory && failure.rank == 1;
    ASSERT_TRUE(own || (failure.code == sent.code && failure.peer == sent.peer)) << nth << ": " << failure.text();
  }
  EXPECT_GE(nth, 5) << "nearly nothing allocates there";
}

TEST(ControlPlane, GivesAQuestionForThisRankToItsGroup) {
  Plane plane;
  plane.send(question(3, 1)); // rank 0 has passed it on
  plane.send(header(FrameType::Failure), report().serialize());
  EXPECT_EQ(plane.failure().code, ErrorCode::PeerDead); // so the question has been read
  ASSERT_EQ(plane.asked.size(), 1U);
  EXPECT_EQ(plane.asked[0].first, 3);
  EXPECT_EQ(plane.asked[0].second.op_id, 5U);
}

/// Rank 0 of 16, with control links to all its neighbours, whose ends are the test's.
class Crossroads {
 public:
  static constexpr int kRanks = 16;

  explicit Crossroads(int heartbeat_every_ms = 500, int ranks = kRanks) : loop_("test") {
    GroupIdentity self = identity();
    self.rank = 0;
    self.size = ranks;
    self.hosts.assign(static_cast<size_t>(ranks), "host");
    Membership::Config membership;
    membership.rank = 0;
    membership.hosts = self.hosts;
    membership.neighbours = controlNeighbours(0, ranks);
    membership.heartbeat_every_ms = heartbeat_every_ms;
    membership.dead_after_ms = 60000;
    ControlPlane::Events events;
    events.failed = [this](const ErrorRecord& record) {
      EXPECT_TRUE(may_fail) << record.text();
      failed = true;
    };
    events.bulk_link = [](const Hello&, std::unique_ptr<Link>) {};
    events.left = [this](int peer) { left.push_back(peer); };
    events.asked = [](int, const FrameHeader&) { ADD_FAILURE() << "a question for rank 0"; };
    loop_.run([&] {
      plane_ = std::make_unique<ControlPlane>(self, loop_, std::vector<Listener>(), membership, std::move(events));
      plane_->open();
      for (const int peer : membership.neighbours) {
        auto [near, far] = namelessPair();
        links_[peer] = std::move(near);
        plane_->adopt(peer, std::move(far));
      }
    });
  }
  ~Crossroads() {
    loop_.run([&] { plane_.reset(); });
    loop_.stop();
  }

  void send(int from, FrameHeader header, const std::string& payload = "") {
    const AbortToken none;
    header.payload_nbytes = static_cast<uint32_t>(payload.size());
    std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
    bytes += payload;
    writeAll(
        *links_.at(from),
        {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()},
        Deadline::after(5000),
        none);
  }
  void ask(int to) {
    loop_.run([&] { plane_->ask({Question{to, header(FrameType::Waiting)}}); });
  }
  /// The frame that comes next at that neighbour, but for heartbeats; nothing within `timeout_ms`: of type Hello.
  FrameHeader next(int at, int timeout_ms = 5000) {
    const AbortToken none;
    const Deadline deadline = Deadline::after(timeout_ms);
    FrameHeader frame;
    try {
      do {
        readAll(*links_.at(at), {reinterpret_cast<std::byte*>(&frame), sizeof frame}, deadline, none);
        std::vector<std::byte> payload(frame.payload_nbytes);
        readAll(*links_.at(at), {payload.data(), payload.size()}, deadline, none);
      } while (frame.type == FrameType::Heartbeat);
    } catch (const Error&) {
      frame = header(FrameType::Hello);
    }
    return frame;
  }
  /// Which neighbour gets a question for `to`; -1 for none.
  int way(int to) {
    ask(to);
    for (const auto& entry : links_) {
      const FrameHeader frame = next(entry.first, 1);
      if (frame.type == FrameType::Waiting) {
        EXPECT_EQ(Route::of(frame).from, 0);
        EXPECT_EQ(Route::of(frame).to, to);
        EXPECT_EQ(Route::of(frame).hops, 1U);
        return entry.first;
      }
    }
    return -1;
  }

  std::vector<int> left; ///< of the loop's thread, as the next two
  bool may_fail = false;
  bool failed = false;
  /// Runs on the loop's thread, with the plane and the test's ends of the links.
  template <typename Body>
  void onLoop(const Body& body) {
    loop_.run([&] { body(*plane_, links_); });
  }
  void sync() {
    loop_.run([] {});
  }

 private:
  EventLoop loop_;
  std::unique_ptr<ControlPlane> plane_;
  std::map<int, std::unique_ptr<SocketLink>> links_;
};

TEST(ControlPlane, AQuestionGoesByTheNeighbourThatIsClosestToItsGoal) {
  Crossroads self;
  EXPECT_EQ(self.way(8), 8);
  EXPECT_EQ(self.way(5), 4);
  EXPECT_EQ(self.way(7), 8);
  EXPECT_EQ(self.way(11), 12);
  EXPECT_EQ(self.way(13), 12) << "the lower of two";
  self.send(14, question(13, 5)); // passed on
  const FrameHeader passed = self.next(4);
  EXPECT_EQ(passed.op_id, 5U);
  EXPECT_EQ(Route::of(passed).from, 13);
  EXPECT_EQ(Route::of(passed).hops, 1U);
}

TEST(ControlPlane, AQuestionGoesAroundARankThatHasLeftAndIsDroppedIfItsGoalHas) {
  Crossroads self;
  self.send(4, header(FrameType::Goodbye));
  EXPECT_EQ(self.next(1).type, FrameType::Left); // so it has been read
  EXPECT_EQ(self.way(4), -1);
  EXPECT_EQ(self.way(5), 2);
  self.send(2, question(9, 5));
  EXPECT_EQ(Route::of(self.next(8)).to, 5) << "it does not go back where it came from";
}

TEST(ControlPlane, AQuestionGoesAroundARankThatIsSilent) {
  Crossroads self(20);
  const Deadline soon = Deadline::after(10000);
  int way = self.way(5);
  while (way != 2 && !soon.expired()) { // rank 4 is stopped, the others send heartbeats
    for (const int peer : {1, 2, 8, 12, 14, 15}) {
      self.send(peer, header(FrameType::Heartbeat));
    }
    way = self.way(5);
  }
  EXPECT_EQ(way, 2);
  EXPECT_EQ(self.way(4), 4) << "it may continue";
}

TEST(ControlPlane, AQuestionThatFindsNoWayEndsSomewhere) {
  Crossroads self;
  FrameHeader lost = question(13, 5);
  lost.index = 32; // hops
  self.send(14, lost);
  FrameHeader last = question(13, 6);
  last.index = 31;
  self.send(14, last);
  EXPECT_EQ(Route::of(self.next(4)).to, 6);
}

TEST(ControlPlane, AGoodbyeIsPassedOnOnceToAllOthers) {
  Crossroads self;
  FrameHeader news = header(FrameType::Left);
  news.root = 7; // no neighbour
  self.send(1, news);
  for (const int peer : {2, 4, 8, 12, 14, 15}) {
    const FrameHeader passed = self.next(peer);
    EXPECT_EQ(passed.type, FrameType::Left) << peer;
    EXPECT_EQ(passed.root, 7) << peer;
  }
  self.send(2, news); // by another way
  news.root = 0; // comes back to who said it
  self.send(2, news);
  self.send(2, header(FrameType::Goodbye));
  const FrameHeader passed = self.next(1);
  EXPECT_EQ(passed.type, FrameType::Left);
  EXPECT_EQ(passed.root, 2) << "rank 7's is not told to who told it, nor twice";
  self.sync();
  EXPECT_EQ(self.left, (std::vector<int>{7, 2}));
}

// Once this rank knows the report, and fails because of it, its neighbours get it, too: no allocation that fails in between loses it.
TEST(ControlPlane, AReportThatCannotBePassedOnForWantOfMemoryIsPassedOnLater) {
  int known = 0;
  bool threw = true;
  for (int64_t nth = 1; threw; ++nth) {
    ASSERT_LT(nth, 1000);
    Crossroads self;
    self.may_fail = true;
    const ErrorRecord record = report();
    self.onLoop([&](ControlPlane& plane, auto&) { threw = throwsWithoutMemory(nth, [&] { plane.notice(record); }); });
    const auto failed = [&] {
      bool has_failed = false;
      self.onLoop([&](ControlPlane&, auto&) { has_failed = self.failed; });
      return has_failed;
    };
    for (const Deadline soon = Deadline::after(200); !failed() && !soon.expired();) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (!failed()) {
      continue; // there was no memory to know it
    }
    known += threw ? 1 : 0;
    for (const int peer : {1, 2, 4, 8, 12, 14, 15}) {
      ASSERT_EQ(self.next(peer).type, FrameType::Failure) << "rank " << peer << ", allocation " << nth;
    }
  }
  EXPECT_GE(known, 2);
}

TEST(ControlPlane, WhyARankLeavesExplainsItsDepartureAndNoOther) {
  ErrorRecord why = report();
  why.peer = -1;
  why.summary = "group 'tp' of ranks 2, 3 had failed: Rank 3 is gone.";
  for (const int who : {2, 3}) {
    Plane plane;
    FrameHeader leaving = header(FrameType::Leaving);
    leaving.root = who;
    plane.send(leaving, why.serialize());
    ErrorRecord left = report();
    left.code = ErrorCode::PeerLeft;
    left.summary = "Rank 2 closed its process group.";
    plane.send(header(FrameType::Failure), left.serialize());
    const bool explains = who == left.peer;
    EXPECT_EQ(
        plane.failure().summary,
        explains ? "Rank 2 closed its process group, after group 'tp' of ranks 2, 3 had failed: Rank 3 is gone."
                 : left.summary);
  }
  Plane plane;
  FrameHeader of_nobody = header(FrameType::Leaving);
  of_nobody.root = kSize;
  plane.send(of_nobody, why.serialize());
  EXPECT_EQ(plane.failure().code, ErrorCode::ProtocolViolation);
}

TEST(ControlPlane, WhyARankLeavesIsPassedOnOnce) {
  Crossroads self;
  FrameHeader leaving = header(FrameType::Leaving);
  leaving.root = 7; // no neighbour
  const std::string why = report().serialize();
  self.send(1, leaving, why);
  EXPECT_EQ(self.next(2).type, FrameType::Leaving);
  self.send(4, leaving, why); // by another way
  self.send(4, header(FrameType::Goodbye));
  EXPECT_EQ(self.next(2).type, FrameType::Left);
  EXPECT_EQ(self.next(1).type, FrameType::Left) << "it is not told to who told it";
}

TEST(ControlPlane, GoodbyesAreNotPassedOnToRanksThatHaveLeft) {
  Crossroads self;
  self.send(4, header(FrameType::Goodbye));
  EXPECT_EQ(self.next(1).root, 4);
  FrameHeader news = header(FrameType::Left);
  news.root = 7;
  self.send(1, news);
  EXPECT_EQ(self.next(2).root, 4);
  EXPECT_EQ(self.next(2).root, 7); // so it has been passed on
  EXPECT_EQ(self.next(4, 1).type, FrameType::Hello) << "nothing";
}

// Many ranks leave at once, and each one's goodbye goes to all neighbours: one system call per link, not one per goodbye.
TEST(ControlPlane, GoodbyesThatArriveTogetherAreWrittenTogether) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs PYCOMM_FAULT_POINTS, to count writes";
  }
  Crossroads self(60000);
  armFaultPoints("control.send:1000000:delay=0");
  self.onLoop([](ControlPlane&, auto& links) {
    std::string bytes;
    for (const int rank : {3, 5, 6, 7, 9, 10, 11, 13}) {
      FrameHeader news = header(FrameType::Left);
      news.root = rank;
      bytes.append(reinterpret_cast<const char*>(&news), sizeof news);
    }
    const AbortToken none;
    writeAll(
        *links.at(1), {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, Deadline::after(5000), none);
  });
  for (const int peer : {2, 4, 8, 12, 14, 15}) {
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(self.next(peer).type, FrameType::Left);
    }
  }
  self.sync();
  const int64_t writes = faultPointTallies().at(0).visits;
  armFaultPoints("");
  EXPECT_LE(writes, 6);
}

// Its goodbye and the end of its link are there, but this rank writes before it reads.
TEST(ControlPlane, AFailingWriteDoesNotThrowAwayAGoodbyeThatHasArrived) {
  for (const bool by_question : {true, false}) {
    Crossroads self;
    self.onLoop([&](ControlPlane& plane, auto& links) {
      const FrameHeader goodbye = header(FrameType::Goodbye);
      const AbortToken none;
      writeAll(
          *links.at(4), {reinterpret_cast<const std::byte*>(&goodbye), sizeof goodbye}, Deadline::after(5000), none);
      links.erase(4);
      if (by_question) {
        plane.ask({Question{4, header(FrameType::Waiting)}});
      } else {
        plane.peerLeft(7); // passed on to all
      }
    });
    self.sync();
    EXPECT_EQ(self.left, std::vector<int>{4}) << by_question;
  }
}

// A link that is not read takes no more than its buffer: questions would leave no room for the goodbye, and the rank would look dead.
TEST(ControlPlane, AGoodbyeDoesNotWaitBehindQuestions) {
  Crossroads self(60000);
  FrameHeader last;
  self.onLoop([&](ControlPlane& plane, auto& links) {
    for (int i = 0; i < 10000; ++i) { // more than the queue and the socket hold
      FrameHeader asked = header(FrameType::Waiting);
      asked.op_id = 5;
      plane.ask({Question{4, asked}});
    }
    std::string bytes;
    const auto readAll = [&] {
      std::vector<std::byte> some(1 << 16);
      for (Progress got = links.at(4)->tryRead({some.data(), some.size()}); got.nbytes > 0;
           got = links.at(4)->tryRead({some.data(), some.size()})) {
        bytes.append(reinterpret_cast<const char*>(some.data()), got.nbytes);
      }
    };
    readAll();
    const size_t before = bytes.size();
    EXPECT_LT(before, 10000 * sizeof(FrameHeader)) << "some wait for room";
    static_cast<void>(plane.close());
    readAll();
    EXPECT_LE(bytes.size(), before + 2 * sizeof(FrameHeader)) << "one that had begun, and the goodbye";
    ASSERT_EQ(bytes.size() % sizeof(FrameHeader), 0U);
    std::memcpy(static_cast<void*>(&last), bytes.data() + bytes.size() - sizeof last, sizeof last);
  });
  EXPECT_EQ(last.type, FrameType::Goodbye);
}

// A route has 16 bits for each rank.
TEST(ControlPlane, InAGroupOfMoreThan65536RanksQuestionsDoNotTravelHere) {
  Crossroads largest(60000, 65536);
  EXPECT_EQ(largest.way(32768), 32768);
  Crossroads larger(60000, 65537);
  EXPECT_EQ(larger.way(8), -1);
}

// Of each pair of neighbours the lower rank opens the control link.
TEST(ControlPlane, TakesAControlLinkFromALowerNeighbourOnly) {
  Plane plane;
  EXPECT_EQ(plane.missing(), (std::vector<int>{2, 3}));
  plane.welcome(2, LinkPurpose::Control);
  plane.welcome(3, LinkPurpose::Control);
  plane.welcome(1, LinkPurpose::Control);
  EXPECT_EQ(plane.missing(), (std::vector<int>{2, 3})) << "they do not connect to this rank";
  plane.welcome(3, LinkPurpose::Bulk);
  EXPECT_EQ(plane.bulk_links, 1);
}

// Each allocation fails once. The link is there and watched; or there but not read, and its peer learns why; or it is closed, and another one
// can be taken.
TEST(ControlPlane, ALinkForWhichThereIsNoMemoryIsReadOrToldOrClosed) {
  bool struck = true;
  int closed = 0;
  int unread = 0;
  for (int64_t nth = 1; struck; ++nth) {
    ASSERT_LT(nth, 1000);
    Plane plane;
    auto [first, first_end] = namelessPair();
    auto [second, second_end] = namelessPair();
    const bool threw = plane.adopt(3, std::move(first_end), nth);
    struck = plane.struck;
    EXPECT_FALSE(plane.adopt(3, std::move(second_end), 0)); // closed if the first is there
    std::byte some{};
    const bool taken = !first->tryRead({&some, 1}).closed;
    plane.peer.swap(taken ? first : second); // the other one keeps that of rank 0, whose end would be a failure, too
    if (taken && threw) {
      ++unread;
      plane.reportNoMemory();
      EXPECT_EQ(plane.failure().code, ErrorCode::OutOfMemory) << "allocation " << nth;
      const std::optional<ErrorRecord> told = plane.told();
      ASSERT_TRUE(told) << "allocation " << nth;
      EXPECT_EQ(told->code, ErrorCode::OutOfMemory) << told->text();
      continue;
    }
    closed += taken ? 0 : 1;
    plane.send(header(FrameType::Failure), report().serialize());
    EXPECT_EQ(plane.failure().peer, report().peer) << "allocation " << nth;
  }
  EXPECT_GE(closed, 3);
  EXPECT_GE(unread, 1) << "the loop needs memory to watch a link";
}

// The group has failed by then, so no later report would go to the link.
TEST(ControlPlane, ALinkThatCannotBeWatchedBringsTheNewsAllTheSame) {
  int unread = 0;
  for (int64_t nth = 1; unread == 0; ++nth) {
    ASSERT_LT(nth, 1000);
    Plane plane;
    plane.send(header(FrameType::Failure), report().serialize());
    EXPECT_EQ(plane.failure().code, ErrorCode::PeerDead);
    auto [near, far] = namelessPair();
    const bool threw = plane.adopt(3, std::move(far), nth);
    ASSERT_TRUE(plane.struck) << "the loop needs memory to watch a link";
    plane.peer.swap(near);
    unread += threw && plane.told(200) ? 1 : 0;
  }
}

// They come in one turn of the loop.
TEST(ControlPlane, ALinkForWhichThereIsNoMemoryCostsNoOther) {
  std::vector<Listener> listeners;
  listeners.push_back(Listener::bind(kLoopback, {}));
  const SocketAddress address = listeners.front().address();
  Plane plane(std::move(listeners));
  std::vector<std::unique_ptr<SocketLink>> peers;
  plane.onLoop([&] {
    plane.refuses_next_bulk_link = true;
    for (const int rank : {0, 2}) {
      peers.push_back(connectSocket(kLoopback, address, Deadline::after(10000), kNoAbort));
      Hello hello = identity().hello(LinkPurpose::Bulk);
      hello.rank = rank;
      const std::string bytes = encodeHello(hello);
      const ConstBufferView view(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
      writeAll(*peers.back(), view, Deadline::after(10000), kNoAbort);
      EXPECT_TRUE(waitDelivered(peers.back()->fd()));
    }
  });
  EXPECT_EQ(plane.failure().code, ErrorCode::OutOfMemory);
  int taken = 0;
  plane.onLoop([&] { taken = plane.bulk_links; });
  EXPECT_EQ(taken, 1);
}

// A group that has failed is kept until the program closes it, which may be hours later, and a neighbour may be stopped for as long.
TEST(ControlPlane, HeartbeatsDoNotPileUpForANeighbourThatReadsNothing) {
  constexpr size_t kBeats = 20000;
  Crossroads self;
  self.may_fail = true;
  self.onLoop([&](ControlPlane& plane, auto&) {
    for (size_t i = 0; i < kBeats; ++i) {
      plane.tick(plane.nextTick());
    }
  });
  EXPECT_TRUE(self.failed) << "nobody was heard";
  size_t frames = 0;
  for (size_t before = 1; before != frames;) { // a loop that has nothing left to write brings no more
    before = frames;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    self.onLoop([&](ControlPlane&, auto& links) {
      std::vector<std::byte> some(1 << 20);
      for (Progress got = links.at(4)->tryRead({some.data(), some.size()}); got.nbytes > 0;
           got = links.at(4)->tryRead({some.data(), some.size()})) {
        frames += got.nbytes / sizeof(FrameHeader);
      }
    });
  }
  EXPECT_GT(frames, 0U);
  EXPECT_LT(frames, kBeats / 2);
}

} // namespace
} // namespace pycomm::testing
