#include "engine/data/matching.h"

#include <gtest/gtest.h>

#include "allocations.h"
#include "engine/data/rank_tables.h"
#include "schedule/make_schedule.h"

namespace pycomm::testing {
namespace {

using ActionKind = Action::Kind;

constexpr int64_t kLarge = 4 << 20; // elements: 16 MiB of float32

RankTables::Config protocolConfig(int rank, int size) {
  RankTables::Config config;
  config.rank = rank;
  config.size = size;
  config.group = 7;
  for (int i = 0; i < size; ++i) {
    config.hosts.push_back("host" + std::to_string(i));
  }
  return config;
}

struct Posted {
  OperationId id;
  Descriptor descriptor;
  std::shared_ptr<const PreparedSchedule> schedule;
};

Posted broadcastOf(int64_t sequence, int rank, int size, int root, int64_t numel) {
  ScheduleRequest request;
  request.kind = Collective::Broadcast;
  request.dtype = DType::Float32;
  request.rank = rank;
  request.size = size;
  request.root = root;
  request.numel = numel;
  Posted posted;
  posted.id = {static_cast<uint64_t>(sequence), sequence};
  posted.schedule = prepare(makeSchedule(request));
  posted.descriptor = Descriptor::of(request, posted.schedule->schedule.algorithm);
  return posted;
}

void post(RankTables& tables, const Posted& posted, TimePoint now = Clock::now()) {
  tables.posted(posted.id, posted.descriptor, *posted.schedule, now);
}

FrameHeader frameOf(const Posted& posted, FrameType type, uint32_t payload_nbytes = 0, uint64_t aux = 0) {
  FrameHeader header;
  header.type = type;
  header.group = 7;
  header.op_id = posted.id.id;
  header.payload_nbytes = payload_nbytes;
  header.aux = aux;
  posted.descriptor.writeTo(header);
  return header;
}

std::vector<Action> of(ActionKind kind, std::vector<Action> actions) {
  std::vector<Action> chosen;
  for (Action& action : actions) {
    if (action.kind == kind) {
      chosen.push_back(std::move(action));
    }
  }
  return chosen;
}

TEST(Matching, AnOperationThatGetsNoMemoryLeavesNothing) {
  for (const int rank : {0, 1}) { // announces a message, grants credit for one
    Posted posted = broadcastOf(1, rank, 2, 0, kLarge);
    posted.descriptor.kind = rank == 0 ? Collective::Send : Collective::Recv;
    bool struck = true;
    int refused = 0;
    for (int64_t nth = 1; struck; ++nth) {
      ASSERT_LT(nth, 1000);
      RankTables tables(protocolConfig(rank, 2));
      const TimePoint now = Clock::now();
      const Deadline deadline = Deadline::at(now + std::chrono::seconds(1));
      failAllocation(nth);
      bool threw = false;
      try {
        tables.posted(posted.id, posted.descriptor, *posted.schedule, now, deadline);
      } catch (const std::bad_alloc&) {
        threw = true;
      }
      struck = allocationFailed();
      failAllocation(0);
      ASSERT_EQ(threw, struck);
      if (!threw) {
        continue;
      }
      ++refused;
      const RankTables::Usage usage = tables.usage();
      EXPECT_EQ(usage.operations, 0U) << "rank " << rank << ", allocation " << nth;
      EXPECT_EQ(usage.granted_early, 0U) << "rank " << rank << ", allocation " << nth;
      EXPECT_TRUE(tables.tables.actions.empty()) << "rank " << rank << ", allocation " << nth;
      EXPECT_TRUE(tables.takeCreditActions().empty()) << "rank " << rank << ", allocation " << nth;
      EXPECT_EQ(tables.tables.highest_sequence, 0) << "rank " << rank << ", allocation " << nth;
      tables.tick(now + std::chrono::seconds(2));
      EXPECT_TRUE(of(ActionKind::Overdue, tables.takeActions()).empty());
      post(tables, posted, now); // again, with memory
      EXPECT_EQ(of(ActionKind::Send, tables.takeActions()).size(), 1U) << "rank " << rank << ", allocation " << nth;
    }
    EXPECT_GT(refused, 3);
  }
}

TEST(Matching, CreditOfLessThanNothingIsAViolation) {
  for (const uint64_t op_id : {0, 1}) { // of the pool, and of an operation
    RankTables root(protocolConfig(0, 2));
    const Posted posted = broadcastOf(1, 0, 2, 0, kLarge);
    post(root, posted);
    FrameHeader credit = frameOf(posted, FrameType::Credit, 0, uint64_t{1} << 63);
    credit.op_id = op_id;
    EXPECT_EQ(root.arrived(1, credit, Clock::now()), RankTables::Verdict::Ignore);
    const auto failures = of(ActionKind::Notice, root.takeActions());
    ASSERT_EQ(failures.size(), 1U);
    EXPECT_EQ(failures[0].record.code, ErrorCode::ProtocolViolation);
  }
}

TEST(Matching, SmallGoesEagerlyLargeWaitsForCredit) {
  RankTables root(protocolConfig(0, 2));
  const Posted small = broadcastOf(1, 0, 2, 0, 100);
  const Posted large = broadcastOf(2, 0, 2, 0, kLarge);
  post(root, small);
  post(root, large);
  EXPECT_EQ(root.maySend(1, 1, 400), RankTables::Permission::Eager);
  EXPECT_EQ(root.maySend(2, 1, 256 << 10), RankTables::Permission::No);

  EXPECT_EQ(root.arrived(1, frameOf(large, FrameType::Credit, 0, 1 << 20), Clock::now()), RankTables::Verdict::Ignore);
  const auto may_send = of(ActionKind::MaySend, root.takeActions());
  ASSERT_EQ(may_send.size(), 1U);
  EXPECT_EQ(may_send.front().op_id, 2U);
  EXPECT_EQ(root.maySend(2, 1, 256 << 10), RankTables::Permission::Credit);
  root.sent(2, 1, 1 << 20, RankTables::Permission::Credit);
  EXPECT_EQ(root.maySend(2, 1, 1), RankTables::Permission::No);
}

TEST(Matching, CreditThatComesBeforeTheOperationIsKept) {
  RankTables root(protocolConfig(0, 2));
  const Posted large = broadcastOf(1, 0, 2, 0, kLarge);
  static_cast<void>(root.arrived(1, frameOf(large, FrameType::Credit, 0, 1 << 20), Clock::now()));
  post(root, large);
  EXPECT_EQ(root.maySend(1, 1, 1 << 20), RankTables::Permission::Credit);
}

TEST(Matching, ReceiverGrantsItsWindowAndRaisesItAsBytesAreUsed) {
  RankTables leaf(protocolConfig(1, 2));
  const Posted large = broadcastOf(1, 1, 2, 0, kLarge);
  post(leaf, large);
  auto credits = of(ActionKind::Send, leaf.takeActions());
  ASSERT_EQ(credits.size(), 1U);
  EXPECT_EQ(credits.front().header.type, FrameType::Credit);
  EXPECT_EQ(credits.front().header.aux, uint64_t{4} << 20);

  leaf.consumed(1, 0, 512 << 10, false);
  EXPECT_TRUE(leaf.takeActions().empty()); // not worth a frame
  leaf.consumed(1, 0, 512 << 10, false);
  credits = of(ActionKind::Send, leaf.takeActions());
  ASSERT_EQ(credits.size(), 1U);
  EXPECT_EQ(credits.front().header.aux, uint64_t{5} << 20);
}

TEST(Matching, EagerDataIsHeldUntilItsOperationIsPosted) {
  RankTables leaf(protocolConfig(1, 2));
  const Posted small = broadcastOf(1, 1, 2, 0, 100);
  EXPECT_EQ(leaf.arrived(0, frameOf(small, FrameType::Data, 400, kEagerFlag), Clock::now()), RankTables::Verdict::Keep);
  post(leaf, small);
  EXPECT_FALSE(leaf.failed());
}

TEST(Matching, ACrowdedPoolGivesPostedOperationsCredit) {
  RankTables leaf(protocolConfig(1, 2));
  const Posted wanted = broadcastOf(1000, 1, 2, 0, 16 << 10);
  post(leaf, wanted);
  EXPECT_TRUE(leaf.takeActions().empty());
  for (int64_t i = 1; i <= 9; ++i) { // 9 x 64 KiB is more than half of 1 MiB
    const Posted other = broadcastOf(i, 1, 2, 0, 16 << 10);
    EXPECT_EQ(
        leaf.arrived(0, frameOf(other, FrameType::Data, 64 << 10, kEagerFlag), Clock::now()),
        RankTables::Verdict::Keep);
  }
  const auto credits = of(ActionKind::Send, leaf.takeActions());
  ASSERT_FALSE(credits.empty());
  EXPECT_EQ(credits.front().header.op_id, 1000U);
}

TEST(Matching, TheSenderStopsWhenThePoolIsFullAndGoesOnWhenRoomComesBack) {
  RankTables root(protocolConfig(0, 2));
  int64_t sent = 0;
  int64_t i = 1;
  for (; i <= 100; ++i) {
    const Posted small = broadcastOf(i, 0, 2, 0, 16 << 10);
    post(root, small);
    if (root.maySend(static_cast<uint64_t>(i), 1, 64 << 10) != RankTables::Permission::Eager) {
      break;
    }
    root.sent(static_cast<uint64_t>(i), 1, 64 << 10, RankTables::Permission::Eager);
    sent += 64 << 10;
  }
  EXPECT_EQ(sent, 1 << 20);
  FrameHeader room;
  room.type = FrameType::Credit;
  room.group = 7;
  room.aux = (64 << 10) + sizeof(FrameHeader); // what the frame had cost
  static_cast<void>(root.arrived(1, room, Clock::now()));
  EXPECT_EQ(root.maySend(static_cast<uint64_t>(i), 1, 64 << 10), RankTables::Permission::Eager);
}

TEST(Matching, RoomThatComesBackIsForTheOldest) {
  RankTables root(protocolConfig(0, 2));
  std::vector<uint64_t> oldest_first;
  for (int64_t i = 1; i <= 40; ++i) {
    post(root, broadcastOf(i, 0, 2, 0, 16));
    oldest_first.push_back(static_cast<uint64_t>(i));
  }
  static_cast<void>(root.takeActions());
  FrameHeader room;
  room.type = FrameType::Credit;
  room.group = 7;
  room.aux = 1000;
  static_cast<void>(root.arrived(1, room, Clock::now()));
  std::vector<uint64_t> may_send;
  for (const Action& action : of(ActionKind::MaySend, root.takeActions())) {
    may_send.push_back(action.op_id);
  }
  EXPECT_EQ(may_send, oldest_first);
}

TEST(Matching, OfManyOperationsTheOldestAsk) {
  RankTables::Config config = protocolConfig(0, 2);
  config.max_asking = 3;
  RankTables root(config);
  const TimePoint start = Clock::now();
  for (int64_t i = 1; i <= 10; ++i) {
    post(root, broadcastOf(i, 0, 2, 0, 16), start);
  }
  Posted derived = broadcastOf(11, 0, 2, 0, 16); // of a callback: it is in no order with the others
  derived.id = {kDerivedIdBit | 11U, -1};
  post(root, derived, start);
  static_cast<void>(root.takeActions());
  const auto asked = [&](TimePoint now) {
    root.tick(now);
    std::vector<uint64_t> ids;
    for (const Action& action : of(ActionKind::Send, root.takeActions())) {
      EXPECT_EQ(action.header.type, FrameType::Waiting);
      ids.push_back(action.op_id != 0 ? action.op_id : action.header.op_id);
    }
    return ids;
  };
  const TimePoint waited = start + std::chrono::milliseconds(50);
  EXPECT_EQ(asked(waited), (std::vector<uint64_t>{1, 2, 3, kDerivedIdBit | 11U}));
  EXPECT_EQ(asked(waited), std::vector<uint64_t>());
  EXPECT_GT(root.nextTick(), waited);
  root.ended(2);
  EXPECT_LE(root.nextTick(), waited) << "the next one asks at once";
  EXPECT_EQ(asked(waited), std::vector<uint64_t>{4});
}

// Of the header's byte, which has room for what no rank of this build sends.
TEST(Matching, AWireByteThatIsNoCodecIsADifference) {
  const Descriptor mine = broadcastOf(1, 1, 2, 0, 100).descriptor;
  FrameHeader header;
  mine.writeTo(header);
  EXPECT_EQ(Descriptor::readFrom(header), mine);
  for (const int byte : {static_cast<int>(DType::Float16), 0x7f, 0x80, 0xff}) {
    header.codec = static_cast<uint8_t>(byte);
    EXPECT_NE(Descriptor::readFrom(header), mine) << byte;
  }
}

TEST(Matching, EveryFieldOfTheDescriptorIsCompared) {
  const auto changes = std::vector<void (*)(Descriptor&)>{
      [](Descriptor& d) { d.kind = Collective::Reduce; },
      [](Descriptor& d) { d.dtype = DType::Int32; },
      [](Descriptor& d) { d.reduce_op = ReduceOp::Max; },
      [](Descriptor& d) { d.codec = Codec::Int8; },
      [](Descriptor& d) { d.algorithm = Algorithm::Pairwise; },
      [](Descriptor& d) { d.root = 1; },
      [](Descriptor& d) { d.numel = 99; },
      [](Descriptor& d) { d.tag = 5; },
      [](Descriptor& d) { d.digest = 5; },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    RankTables leaf(protocolConfig(1, 2));
    const Posted mine = broadcastOf(1, 1, 2, 0, 100);
    Posted theirs = mine;
    changes[i](theirs.descriptor);
    post(leaf, mine);
    EXPECT_EQ(
        leaf.arrived(0, frameOf(theirs, FrameType::Data, 400, kEagerFlag), Clock::now()), RankTables::Verdict::Ignore);
    const auto fails = of(ActionKind::Notice, leaf.takeActions());
    ASSERT_EQ(fails.size(), 1U) << i;
    EXPECT_EQ(fails.front().record.code, ErrorCode::CollectiveMismatch);
    EXPECT_EQ(fails.front().record.peer, 0);
    EXPECT_NE(fails.front().record.summary.find("host0"), std::string::npos);
  }
}

TEST(Matching, AMismatchIsSeenOnPostingAfterwardsAndAfterTheEnd) {
  const Posted mine = broadcastOf(1, 1, 2, 0, 100);
  const Posted theirs = broadcastOf(1, 1, 2, 0, 101);
  RankTables before(protocolConfig(1, 2));
  static_cast<void>(before.arrived(0, frameOf(theirs, FrameType::Waiting), Clock::now()));
  post(before, mine);
  EXPECT_TRUE(before.failed());

  RankTables after(protocolConfig(1, 2));
  post(after, mine);
  after.ended(1);
  static_cast<void>(after.arrived(0, frameOf(theirs, FrameType::Waiting), Clock::now()));
  EXPECT_TRUE(after.failed());
}

/// What one rank passes to a gather or scatter: a leaf knows its own part only.
Posted partsOf(Collective kind, int rank, std::vector<int64_t> counts) {
  ScheduleRequest request;
  request.kind = kind;
  request.dtype = DType::Float32;
  request.rank = rank;
  request.size = static_cast<int32_t>(counts.size());
  request.root = 0;
  for (int other = 0; rank != 0 && other < request.size; ++other) {
    counts[static_cast<size_t>(other)] *= other == rank ? 1 : 0;
  }
  request.counts = std::move(counts);
  Posted posted;
  posted.id = {1, 1};
  posted.schedule = prepare(makeSchedule(request));
  posted.descriptor = Descriptor::of(request, posted.schedule->schedule.algorithm);
  return posted;
}

FrameHeader saidBy(const RankTables& from, int to, FrameType type) {
  return matching::headerFor(from.tables, from.tables.find(1), type, to);
}

// Only the root knows all sizes, so each pair compares its own: whatever the frame that shows them, and also where the two sizes are whole
// segments, whose frames look alike.
TEST(Matching, PartsOfAGatherOrScatterAreComparedByPair) {
  const std::pair<int64_t, int64_t> sizes[] = {{65536, 131072}, {131072, 65536}, {3, 4}, {0, 1}, {1, 0}};
  for (const Collective kind : {Collective::Gather, Collective::Scatter}) {
    for (const auto& [at_root, at_leaf] : sizes) {
      for (const FrameType type : {FrameType::Waiting, FrameType::Data}) {
        for (const bool by_root : {true, false}) {
          RankTables root(protocolConfig(0, 2));
          RankTables leaf(protocolConfig(1, 2));
          post(root, partsOf(kind, 0, {5, at_root}));
          post(leaf, partsOf(kind, 1, {0, at_leaf}));
          RankTables& from = by_root ? root : leaf;
          RankTables& to = by_root ? leaf : root;
          static_cast<void>(to.arrived(by_root ? 0 : 1, saidBy(from, by_root ? 1 : 0, type), Clock::now()));
          const auto failures = of(ActionKind::Notice, to.takeActions());
          ASSERT_EQ(failures.size(), 1U) << collectiveName(kind) << ' ' << at_root << ' ' << at_leaf << ' ' << by_root;
          const ErrorRecord& record = failures.front().record;
          EXPECT_EQ(record.code, ErrorCode::CollectiveMismatch);
          EXPECT_EQ(record.numel, by_root ? at_leaf : at_root);
          const bool expects = (kind == Collective::Gather) != by_root;
          EXPECT_NE(
              record.summary.find(
                  std::string(expects ? ") expects as " : ") sends as ") + (by_root ? "its" : "the other's") +
                  " part of "),
              std::string::npos)
              << record.summary;
        }
      }
    }
  }
}

TEST(Matching, PartsOfAGatherOrScatterThatFitAreNoMismatch) {
  for (const Collective kind : {Collective::Gather, Collective::Scatter}) {
    RankTables root(protocolConfig(0, 3));
    RankTables leaf(protocolConfig(1, 3));
    RankTables other(protocolConfig(2, 3));
    post(root, partsOf(kind, 0, {5, 131072, 7}));
    post(leaf, partsOf(kind, 1, {5, 131072, 7}));
    post(other, partsOf(kind, 2, {5, 131072, 7}));
    static_cast<void>(root.arrived(1, saidBy(leaf, 0, FrameType::Waiting), Clock::now()));
    static_cast<void>(leaf.arrived(0, saidBy(root, 1, FrameType::Waiting), Clock::now()));
    static_cast<void>(leaf.arrived(2, saidBy(other, 1, FrameType::Waiting), Clock::now()));
    leaf.ended(1);
    static_cast<void>(leaf.arrived(0, saidBy(root, 1, FrameType::Waiting), Clock::now()));
    static_cast<void>(leaf.arrived(2, saidBy(other, 1, FrameType::Waiting), Clock::now()));
    EXPECT_FALSE(root.failed());
    EXPECT_FALSE(leaf.failed());
  }
}

TEST(Matching, WaitsTellThePeerAndLearnWhoHasNotEntered) {
  const TimePoint start = Clock::now();
  RankTables leaf(protocolConfig(1, 3));
  RankTables root(protocolConfig(0, 3));
  const Posted mine = broadcastOf(1, 1, 3, 0, 100);
  post(leaf, mine, start);
  leaf.tick(start + std::chrono::milliseconds(1));
  EXPECT_TRUE(leaf.takeActions().empty());
  leaf.tick(start + std::chrono::milliseconds(3));
  const auto waits = of(ActionKind::Send, leaf.takeActions());
  ASSERT_EQ(waits.size(), 1U);
  EXPECT_EQ(waits.front().peer, 0);
  EXPECT_EQ(waits.front().header.type, FrameType::Waiting);

  static_cast<void>(root.arrived(1, waits.front().header, start));
  const auto replies = of(ActionKind::Send, root.takeActions());
  ASSERT_EQ(replies.size(), 1U);
  EXPECT_EQ(replies.front().header.type, FrameType::NotEntered);
  static_cast<void>(leaf.arrived(0, replies.front().header, start));
  ASSERT_TRUE(leaf.missing(1));
  EXPECT_EQ(leaf.missing(1)->peer, 0);
  EXPECT_EQ(leaf.missing(1)->last, "no operation yet");
}

// Its edge shows that, and costs nothing: data is what most frames are.
TEST(Matching, DataDoesNotMakeARankComeSoItTakesNoMemory) {
  RankTables leaf(protocolConfig(1, 2));
  const Posted mine = broadcastOf(1, 1, 2, 0, 100);
  const TimePoint now = Clock::now();
  post(leaf, mine, now);
  const FrameHeader data = frameOf(mine, FrameType::Data, 400, kEagerFlag);
  failAllocation(1);
  const RankTables::Verdict verdict = leaf.arrived(0, data, now);
  const bool allocates = allocationFailed();
  failAllocation(0);
  EXPECT_EQ(verdict, RankTables::Verdict::Accept);
  EXPECT_FALSE(allocates);
  FrameHeader late = frameOf(mine, FrameType::NotEntered);
  static_cast<void>(leaf.arrived(0, late, now)); // it came another way, and was overtaken
  EXPECT_FALSE(leaf.missing(1).has_value());
}

// A callback ran inline on rank 0, which took number 2 for it, and late on rank 1, which took a derived id.
TEST(Matching, TwoNamesForOneOperationEndInAMismatchNotAtTheDeadline) {
  const TimePoint start = Clock::now();
  const auto exchange = [](RankTables& from, int from_rank, RankTables& to, TimePoint now) {
    for (const auto& action : of(ActionKind::Send, from.takeActions())) {
      static_cast<void>(to.arrived(from_rank, action.header, now));
    }
  };
  for (const bool derived : {true, false}) {
    RankTables inline_rank(protocolConfig(0, 2));
    RankTables late_rank(protocolConfig(1, 2));
    Posted counted = broadcastOf(2, 0, 2, 1, 100);
    Posted other = broadcastOf(3, 1, 2, 0, 100);
    if (derived) {
      other.id = {kDerivedIdBit | 77, -1};
    }
    post(inline_rank, counted, start);
    post(late_rank, other, start);
    TimePoint now = start;
    for (; now < start + std::chrono::seconds(12); now += std::chrono::milliseconds(50)) {
      inline_rank.tick(now);
      late_rank.tick(now);
      exchange(inline_rank, 0, late_rank, now);
      exchange(late_rank, 1, inline_rank, now);
      if (now < start + std::chrono::seconds(9)) {
        ASSERT_FALSE(inline_rank.failed() || late_rank.failed());
      }
    }
    EXPECT_EQ(inline_rank.failed() || late_rank.failed(), derived) << "counted operations may be late for good reasons";
  }
}

/// Two ranks that wait in different operations, in steps of 50 ms.
class Deadlock {
 public:
  explicit Deadlock() {
    late_one_.id = {kDerivedIdBit | 77, -1};
  }
  void enterInline() {
    post(inline_rank, counted_, now_);
  }
  void enterLate() {
    post(late_rank, late_one_, now_);
  }
  void endLate() {
    late_rank.ended(late_one_.id.id);
  }
  void run(int ms) {
    for (const TimePoint end = now_ + std::chrono::milliseconds(ms); now_ < end;
         now_ += std::chrono::milliseconds(50)) {
      inline_rank.tick(now_);
      late_rank.tick(now_);
      exchange(inline_rank, 0, late_rank);
      exchange(late_rank, 1, inline_rank);
      exchange(inline_rank, 0, late_rank);
    }
  }
  [[nodiscard]] bool failed() const noexcept {
    return failures_ != 0;
  }

  RankTables inline_rank{protocolConfig(0, 2)};
  RankTables late_rank{protocolConfig(1, 2)};

 private:
  void exchange(RankTables& from, int from_rank, RankTables& to) {
    for (const auto& action : from.takeActions()) {
      if (action.kind == ActionKind::Notice) {
        EXPECT_EQ(action.record.code, ErrorCode::CollectiveMismatch);
        ++failures_;
      } else if (action.kind == ActionKind::Send) {
        static_cast<void>(to.arrived(from_rank, action.header, now_));
      }
    }
  }

  Posted counted_ = broadcastOf(2, 0, 2, 1, 100);
  Posted late_one_ = broadcastOf(3, 1, 2, 0, 100);
  TimePoint now_ = Clock::now();
  int failures_ = 0;
};

// The first has asked all it asks. The second finds no fresh question, and answers the old one once more.
TEST(Matching, ADeadlockIsFoundAlsoIfOneRankHasWaitedForLong) {
  for (const int earlier_ms : {0, 150, 5000, 60000}) {
    for (const bool inline_first : {true, false}) {
      Deadlock ranks;
      inline_first ? ranks.enterInline() : ranks.enterLate();
      ranks.run(earlier_ms);
      inline_first ? ranks.enterLate() : ranks.enterInline();
      ranks.run(9000);
      EXPECT_FALSE(ranks.failed()) << earlier_ms;
      ranks.run(2000);
      EXPECT_TRUE(ranks.failed()) << earlier_ms << " " << inline_first;
    }
  }
}

// As that of a root does. The other rank is only late for it, because it waits in one that this rank is late for.
TEST(Matching, AnOperationThatEndedWithoutThisRankIsNoDeadlock) {
  for (const int ended_after_ms : {1000, 5000}) {
    Deadlock ranks;
    ranks.enterInline();
    ranks.enterLate();
    ranks.run(ended_after_ms);
    ranks.endLate();
    ranks.run(30000);
    EXPECT_FALSE(ranks.failed()) << ended_after_ms;
  }
}

// A leaf of a tree that enters late may end at once. It has no edge with most of the ranks that wait.
TEST(Matching, ARankThatCameAndEndedIsNotMissing) {
  const Posted leafs = broadcastOf(1, 1, 4, 0, 100);
  const Posted waits = broadcastOf(1, 2, 4, 0, 100);
  RankTables leaf(protocolConfig(1, 4));
  RankTables waiter(protocolConfig(2, 4));
  const TimePoint now = Clock::now();
  post(waiter, waits, now);
  FrameHeader question = frameOf(waits, FrameType::Waiting);
  static_cast<void>(leaf.arrived(2, question, now));
  const auto refused = of(ActionKind::Send, leaf.takeActions());
  ASSERT_EQ(refused.size(), 1U);
  static_cast<void>(waiter.arrived(1, refused[0].header, now));
  ASSERT_EQ(waiter.missing(1)->peer, 1);
  post(leaf, leafs, now);
  leaf.ended(1);
  const auto came = of(ActionKind::Send, leaf.takeActions());
  ASSERT_EQ(came.size(), 1U);
  EXPECT_EQ(came[0].peer, 2);
  static_cast<void>(waiter.arrived(1, came[0].header, now));
  EXPECT_FALSE(waiter.missing(1).has_value());
  EXPECT_FALSE(waiter.failed());
  static_cast<void>(leaf.arrived(2, came[0].header, now)); // an answer is not answered
  EXPECT_TRUE(leaf.takeActions().empty());
}

TEST(Matching, WhatNoPeerSendsIsAViolation) {
  const Posted mine = broadcastOf(1, 1, 2, 0, 100);
  const auto failsWith = [&](FrameHeader header, bool posted_before) {
    RankTables leaf(protocolConfig(1, 2));
    if (posted_before) {
      post(leaf, mine);
    }
    static_cast<void>(leaf.arrived(0, header, Clock::now()));
    const auto fails = of(ActionKind::Notice, leaf.takeActions());
    return fails.size() == 1 && fails.front().record.code == ErrorCode::ProtocolViolation;
  };
  FrameHeader foreign = frameOf(mine, FrameType::Data, 400, kEagerFlag);
  foreign.group = 8;
  EXPECT_TRUE(failsWith(foreign, true));
  EXPECT_TRUE(failsWith(frameOf(mine, FrameType::Data, 400), false)) << "data without credit";
  EXPECT_TRUE(failsWith(frameOf(mine, FrameType::Data, 2 << 20, kEagerFlag), false)) << "more than the pool";
  EXPECT_TRUE(failsWith(frameOf(mine, FrameType::Credit, 0, 100), true)) << "a leaf sends to nobody";
  EXPECT_TRUE(failsWith(frameOf(mine, FrameType::Heartbeat), true));
}

FrameHeader roomOf(int64_t nbytes) {
  FrameHeader room;
  room.type = FrameType::Credit;
  room.group = 7;
  room.aux = static_cast<uint64_t>(nbytes);
  return room;
}

Posted barrierOf(int64_t sequence, int rank, int size) {
  ScheduleRequest request;
  request.kind = Collective::Barrier;
  request.rank = rank;
  request.size = size;
  Posted posted;
  posted.id = {static_cast<uint64_t>(sequence), sequence};
  posted.schedule = prepare(makeSchedule(request));
  posted.descriptor = Descriptor::of(request, posted.schedule->schedule.algorithm);
  return posted;
}

// A frame of 0 bytes has a header, and its receiver keeps a note of it.
TEST(Matching, EmptyFramesFillThePool) {
  const RankTables::Config config = protocolConfig(0, 2);
  const int64_t most = config.eager_pool_nbytes / config.frame_nbytes;
  EXPECT_LE(most, 20000);
  RankTables sender(config);
  RankTables receiver(protocolConfig(1, 2));
  for (int64_t i = 1; i <= most; ++i) {
    const Posted posted = barrierOf(i, 0, 2);
    post(sender, posted);
    ASSERT_EQ(sender.maySend(posted.id.id, 1, 0), RankTables::Permission::Eager) << i;
    sender.sent(posted.id.id, 1, 0, RankTables::Permission::Eager);
    ASSERT_EQ(
        receiver.arrived(0, frameOf(posted, FrameType::Data, 0, kEagerFlag), Clock::now()), RankTables::Verdict::Keep);
  }
  const Posted more = barrierOf(most + 1, 0, 2);
  post(sender, more);
  EXPECT_EQ(sender.maySend(more.id.id, 1, 0), RankTables::Permission::No);
  EXPECT_EQ(
      receiver.arrived(0, frameOf(more, FrameType::Data, 0, kEagerFlag), Clock::now()), RankTables::Verdict::Ignore);
  EXPECT_TRUE(receiver.failed());
}

TEST(Matching, AnEmptyFrameGoesAgainstCreditWhereThePoolIsFull) {
  RankTables sender(protocolConfig(0, 2));
  RankTables receiver(protocolConfig(1, 2));
  const Posted wanted = barrierOf(1000000, 0, 2);
  post(receiver, barrierOf(1000000, 1, 2));
  for (int64_t i = 1;; ++i) {
    const Posted posted = broadcastOf(i, 0, 2, 0, 1 << 10);
    post(sender, posted);
    if (sender.maySend(posted.id.id, 1, 4 << 10) != RankTables::Permission::Eager) {
      break;
    }
    sender.sent(posted.id.id, 1, 4 << 10, RankTables::Permission::Eager);
    static_cast<void>(receiver.arrived(0, frameOf(posted, FrameType::Data, 4 << 10, kEagerFlag), Clock::now()));
  }
  post(sender, wanted);
  // The rest of the pool has no room for a payload, but for some empty frames.
  while (sender.maySend(wanted.id.id, 1, 0) == RankTables::Permission::Eager) {
    sender.sent(wanted.id.id, 1, 0, RankTables::Permission::Eager);
  }
  const auto credits = of(ActionKind::Send, receiver.takeActions());
  ASSERT_FALSE(credits.empty());
  EXPECT_EQ(credits.front().header.op_id, wanted.id.id);
  EXPECT_EQ(credits.front().header.aux, 0U);
  static_cast<void>(sender.arrived(1, credits.front().header, Clock::now()));
  EXPECT_EQ(sender.maySend(wanted.id.id, 1, 0), RankTables::Permission::Credit);
}

// A sender far ahead of a slower receiver, which grants credit for each while its data are on their way. The credit comes when the
// operation has long ended, more than 256 operations ago; a million operations leave nothing behind.
TEST(Matching, CreditForWhatHasEndedIsNotKept) {
  constexpr int64_t kNumel = 64;
  constexpr int64_t kBehind = 400;
  RankTables root(protocolConfig(0, 2));
  for (int64_t i = 1; i <= 100000; ++i) {
    const Posted posted = broadcastOf(i, 0, 2, 0, kNumel);
    post(root, posted);
    ASSERT_EQ(root.maySend(posted.id.id, 1, 4 * kNumel), RankTables::Permission::Eager) << i;
    root.sent(posted.id.id, 1, 4 * kNumel, RankTables::Permission::Eager);
    root.ended(posted.id.id);
    if (i > kBehind) {
      const Posted before = broadcastOf(i - kBehind, 0, 2, 0, kNumel);
      static_cast<void>(root.arrived(1, frameOf(before, FrameType::Credit, 0, 4 * kNumel), Clock::now()));
      static_cast<void>(root.arrived(1, roomOf(4 * kNumel + protocolConfig(0, 2).frame_nbytes), Clock::now()));
    }
    ASSERT_FALSE(root.failed()) << of(ActionKind::Notice, root.takeActions()).front().record.summary;
    static_cast<void>(root.takeActions());
  }
  EXPECT_EQ(root.usage().unexpected, 0U);
  EXPECT_LE(root.usage().past, static_cast<size_t>(protocolConfig(0, 2).eager_pool_nbytes / (4 * kNumel)) + 1);
}

TEST(Matching, WhatHasArrivedGetsNoCredit) {
  RankTables leaf(protocolConfig(1, 2));
  for (int64_t i = 1; i <= 12; ++i) { // more than half of the pool
    static_cast<void>(leaf.arrived(
        0, frameOf(broadcastOf(i, 1, 2, 0, 16 << 10), FrameType::Data, 64 << 10, kEagerFlag), Clock::now()));
  }
  post(leaf, broadcastOf(5, 1, 2, 0, 16 << 10)); // held here
  EXPECT_TRUE(of(ActionKind::Send, leaf.takeActions()).empty());
  post(leaf, broadcastOf(13, 1, 2, 0, 16 << 10)); // yet to come
  EXPECT_EQ(of(ActionKind::Send, leaf.takeActions()).size(), 1U);
}

// Receives that are posted far ahead do not fill the sender's memory with credit: the rest gets it when the sender has come to them.
TEST(Matching, CreditAheadOfTheSenderIsBounded) {
  RankTables leaf(protocolConfig(1, 2));
  RankTables root(protocolConfig(0, 2));
  const auto most = static_cast<int64_t>(protocolConfig(0, 2).max_ahead);
  for (int64_t i = 1; i <= 2 * most; ++i) {
    post(leaf, broadcastOf(i, 1, 2, 0, kLarge));
  }
  const auto credits = of(ActionKind::Send, leaf.takeActions());
  EXPECT_EQ(static_cast<int64_t>(credits.size()), most);
  for (const auto& credit : credits) {
    static_cast<void>(root.arrived(1, credit.header, Clock::now()));
  }
  EXPECT_FALSE(root.failed());
  const Posted late = broadcastOf(most + 10, 0, 2, 0, kLarge);
  static_cast<void>(leaf.arrived(0, frameOf(late, FrameType::Waiting), Clock::now()));
  const auto asked_for = of(ActionKind::Send, leaf.takeActions());
  ASSERT_EQ(asked_for.size(), 1U);
  EXPECT_EQ(asked_for.front().header.type, FrameType::Credit);
  EXPECT_EQ(asked_for.front().header.op_id, late.id.id);
}

TEST(Matching, DataOfWhatIsOnlyWatchedOverIsAViolationOfItsSender) {
  RankTables tables(protocolConfig(0, 2));
  const Posted watched = barrierOf(1, 0, 2);
  PreparedSchedule without_frames; // as of an operation in shared memory that is stuck
  Edge edge;
  edge.peer = 1;
  without_frames.incoming.push_back(edge);
  tables.posted(watched.id, watched.descriptor, without_frames, Clock::now());
  EXPECT_EQ(
      tables.arrived(1, frameOf(watched, FrameType::Data, 0, kEagerFlag), Clock::now()), RankTables::Verdict::Ignore);
  const auto failures = of(ActionKind::Notice, tables.takeActions());
  ASSERT_EQ(failures.size(), 1U);
  EXPECT_EQ(failures[0].record.code, ErrorCode::ProtocolViolation);
  EXPECT_EQ(failures[0].record.peer, 1);
  EXPECT_NE(failures[0].record.summary.find("Rank 1 sent what the protocol does not allow"), std::string::npos);
}

/// What a peer says of an operation that was issued in a callback.
FrameHeader waitingIn(uint64_t number, Collective kind) {
  Posted posted = broadcastOf(1, 0, 2, 0, kLarge);
  posted.id = {kDerivedIdBit | (number << 2U), -1};
  posted.descriptor.kind = kind;
  return frameOf(posted, FrameType::Waiting);
}

size_t placesOf(const RankTables::Config& config) {
  return static_cast<size_t>(config.eager_pool_nbytes / config.frame_nbytes) + 2 * config.max_ahead;
}

// A rank may call any number of collectives ahead of a slow one, which keeps notes of as many as it has places for. Messages have places
// of their own.
TEST(Matching, ManyCollectivesAheadTakeNoPlacesOfMessages) {
  RankTables slow(protocolConfig(1, 2));
  const size_t places = placesOf(protocolConfig(1, 2));
  for (size_t i = 0; i < 2 * places; ++i) {
    static_cast<void>(slow.arrived(0, waitingIn(i, Collective::Broadcast), Clock::now()));
  }
  EXPECT_EQ(of(ActionKind::Send, slow.takeActions()).size(), 2 * places) << "each is answered";
  EXPECT_EQ(slow.usage().unexpected, places) << "and so many are kept";
  for (size_t i = 0; i < places; ++i) {
    static_cast<void>(slow.arrived(0, waitingIn(2 * places + i, Collective::Send), Clock::now()));
    ASSERT_FALSE(slow.failed()) << i << ": " << of(ActionKind::Notice, slow.takeActions()).front().record.summary;
  }
  EXPECT_EQ(slow.usage().unexpected, 2 * places);
}

TEST(Matching, ManyMessagesAheadTakeNoPlacesOfCollectives) {
  RankTables slow(protocolConfig(1, 2));
  const size_t places = placesOf(protocolConfig(1, 2));
  for (size_t i = 0; i < places; ++i) {
    static_cast<void>(slow.arrived(0, waitingIn(i, Collective::Send), Clock::now()));
  }
  static_cast<void>(slow.arrived(0, waitingIn(places, Collective::Broadcast), Clock::now()));
  EXPECT_EQ(slow.usage().unexpected, places + 1);
  EXPECT_FALSE(slow.failed());
}

// The sender of messages announces one for each question, however many it has announced already. So each question makes a place.
TEST(Matching, WhatIsAskedForHasAPlace) {
  RankTables receiver(protocolConfig(1, 2));
  const size_t places = placesOf(protocolConfig(1, 2));
  for (size_t i = 0; i < places + 3; ++i) {
    if (i >= places) {
      receiver.asked(0);
    }
    static_cast<void>(receiver.arrived(0, waitingIn(i, Collective::Send), Clock::now()));
    ASSERT_FALSE(receiver.failed()) << i;
  }
  static_cast<void>(receiver.arrived(0, waitingIn(places + 3, Collective::Send), Clock::now()));
  const auto failures = of(ActionKind::Notice, receiver.takeActions());
  ASSERT_EQ(failures.size(), 1U) << "nobody has asked for this one";
  EXPECT_EQ(failures.front().record.code, ErrorCode::ProtocolViolation);
  EXPECT_NE(failures.front().record.summary.find("announces too many messages"), std::string::npos);
}

// The receiver has given credit for as many operations as it may, and it has no place for the note that the sender waits in one more.
// It posts that one when the sender has long asked everyone.
TEST(Matching, AWaitThatCouldNotBeKeptIsNotLost) {
  RankTables::Config config = protocolConfig(0, 2);
  config.max_ahead = 4;
  RankTables sender(config);
  config.rank = 1;
  RankTables receiver(config);
  TimePoint now = Clock::now();
  int frames = 0;
  const auto runFor = [&](std::chrono::milliseconds time) {
    for (const TimePoint end = now + time; now < end; now += std::chrono::milliseconds(1)) {
      sender.tick(now);
      receiver.tick(now);
      for (bool more = true; more;) {
        const auto from_sender = of(ActionKind::Send, sender.takeActions());
        const auto from_receiver = of(ActionKind::Send, receiver.takeActions());
        for (const auto& action : from_sender) {
          static_cast<void>(receiver.arrived(0, action.header, now));
        }
        for (const auto& action : from_receiver) {
          static_cast<void>(sender.arrived(1, action.header, now));
        }
        more = !from_sender.empty() || !from_receiver.empty();
        frames += static_cast<int>(from_sender.size() + from_receiver.size());
        ASSERT_LT(frames, 100);
      }
    }
  };
  const auto derived = [](uint64_t number, int rank) {
    Posted posted = broadcastOf(1, rank, 2, 0, kLarge);
    posted.id = {kDerivedIdBit | number, -1};
    return posted;
  };
  for (uint64_t i = 0; i < config.max_ahead; ++i) {
    post(receiver, derived(1000 + 4 * i, 1), now);
  }
  runFor(std::chrono::milliseconds(20));
  for (size_t i = 0; i < placesOf(config); ++i) {
    static_cast<void>(receiver.arrived(0, waitingIn(10000 + i, Collective::Broadcast), now));
  }
  static_cast<void>(receiver.takeActions());

  const Posted wanted = derived(4, 0);
  post(sender, wanted, now);
  runFor(std::chrono::milliseconds(1000));
  EXPECT_EQ(sender.maySend(wanted.id.id, 1, 1 << 20), RankTables::Permission::No);
  post(receiver, derived(4, 1), now);
  runFor(std::chrono::milliseconds(20));
  EXPECT_EQ(sender.maySend(wanted.id.id, 1, 1 << 20), RankTables::Permission::Credit);
  EXPECT_FALSE(sender.failed());
  EXPECT_FALSE(receiver.failed());
}

// Both ranks wait for each other's data, which a third one holds up: each says so a few times, and no answer is answered.
TEST(Matching, TwoRanksThatWaitForEachOtherSayItOnce) {
  RankTables first(protocolConfig(0, 2));
  RankTables second(protocolConfig(1, 2));
  TimePoint now = Clock::now();
  post(first, barrierOf(1, 0, 2), now);
  post(second, barrierOf(1, 1, 2), now);
  int frames = 0;
  for (int i = 0; i < 12000; ++i, now += std::chrono::milliseconds(1)) {
    first.tick(now);
    second.tick(now);
    for (const auto& action : of(ActionKind::Send, first.takeActions())) {
      static_cast<void>(second.arrived(0, action.header, now));
      ++frames;
    }
    for (const auto& action : of(ActionKind::Send, second.takeActions())) {
      static_cast<void>(first.arrived(1, action.header, now));
      ++frames;
    }
  }
  EXPECT_LE(frames, 16);
}

} // namespace
} // namespace pycomm::testing
