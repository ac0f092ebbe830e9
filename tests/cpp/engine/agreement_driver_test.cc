#include "engine/survive/agreement_driver.h"

#include <gtest/gtest.h>

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <csignal>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "armed_faults.h"
#include "base/log.h"
#include "engine/meeting/endpoint_words.h"
#include "engine/meeting/instance.h"
#include "engine/meeting/meeting_store.h"
#include "ranks.h"
#include "temp_folder.h"
#include "transport/net/listener.h"
#include "transport/reserved_port.h"
#include "within.h"

namespace pycomm {
namespace {

using testing::ArmedFaults;
using testing::groupConfig;

/// For what comes at once on a machine that has nothing else to do.
Deadline soon() {
  return Deadline::after(60000);
}

/// A process that has met itself, in epoch 1.
struct Alone {
  Alone() : members(engine, groupConfig(0, 1)) {
    JoinAbort nobody;
    met = members.meet(members.plan(1, {members.handle()}), soon(), nobody);
  }
  ~Alone() {
    met.group->close();
  }

  Engine engine;
  Reconfigurable members;
  Reconfigurable::Met met;
};

std::optional<ErrorCode> codeOf(const std::function<void()>& call) {
  try {
    call();
    return std::nullopt;
  } catch (const Error& error) {
    return error.record().code;
  }
}

TEST(AgreementDriver, IsNotOpenedIfTheEngineIsShutDownMeanwhile) {
  Alone alone;
  EXPECT_EQ(
      codeOf([&] {
        (void)AgreementDriver::open(alone.members, alone.met, {}, [&] { (void)alone.engine.shutdown(soon()); });
      }),
      ErrorCode::ShutDown);
}

TEST(AgreementDriver, IsRefusedForMoreMembersThanAnAgreementHas) {
  Alone alone;
  std::vector<MemberHandle> many(elastic::kMaxMembers + 1);
  for (MemberHandle& member : many) {
    member.incarnation = newProcessId();
  }
  many.front() = MemberHandle::parse(alone.members.handle());
  const Reconfigurable::Met met{nullptr, nullptr, std::make_shared<Instance>(2, many)};
  EXPECT_EQ(codeOf([&] { (void)AgreementDriver::open(alone.members, met, {}, [] {}); }), ErrorCode::InvalidArgument);
}

TEST(AgreementDriver, IsTheOnlyOneOfItsMember) {
  Alone alone;
  const auto driver = AgreementDriver::open(alone.members, alone.met, {}, [] {});
  EXPECT_EQ(
      codeOf([&] { (void)AgreementDriver::open(alone.members, alone.met, {}, [] {}); }), ErrorCode::InvalidArgument);
  EXPECT_TRUE(driver->begin(soon())); // the first has lost nothing
}

TEST(AgreementDriver, DeliversEachStepBeforeTheNextBegins) {
  Alone alone;
  const auto driver = AgreementDriver::open(alone.members, alone.met, {}, [] {});
  ASSERT_TRUE(driver->begin(soon()));
  ASSERT_TRUE(driver->begin(soon())); // one that this rank has not finished counts nowhere
  ASSERT_TRUE(driver->finished(1));
  EXPECT_EQ(codeOf([&] { (void)driver->begin(soon()); }), ErrorCode::Aborted);
  EXPECT_EQ(codeOf([&] { (void)driver->finished(1); }), ErrorCode::Aborted);
  EXPECT_TRUE(driver->committed(1, {}));
  EXPECT_TRUE(driver->begin(soon()));
  EXPECT_EQ(driver->steps(), 1);
}

TEST(AgreementDriver, CallsMembersByTheirNumbersInTheJob) {
  const std::vector<int> numbers = {2, 5, 7};
  struct Member {
    Engine engine;
    std::optional<Reconfigurable> members;
    std::shared_ptr<AgreementDriver> driver;
  };
  std::vector<Member> all(3);
  std::vector<std::string> handles;
  for (size_t i = 0; i < all.size(); ++i) {
    Group::Config config = groupConfig(static_cast<int>(i), 3);
    config.rendezvous.job = JobRanks(numbers);
    all[i].members.emplace(all[i].engine, config);
    handles.push_back(all[i].members->handle());
  }
  std::barrier<> together(3);
  const auto onEach = [&](size_t first, const std::function<void(Member&)>& body) {
    std::vector<std::thread> threads;
    for (size_t i = first; i < all.size(); ++i) {
      threads.emplace_back([&, i] { body(all[i]); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  };
  onEach(0, [&](Member& one) {
    JoinAbort nobody;
    const Reconfigurable::Met met = one.members->meet(one.members->plan(1, handles), soon(), nobody);
    AgreementDriver::Config config;
    config.min_ranks = 2;
    one.driver = AgreementDriver::open(*one.members, met, config, [&] { together.arrive_and_wait(); });
  });
  all[0].driver->close();
  onEach(1, [&](Member& one) {
    std::optional<AgreementDriver::Epoch> epoch;
    for (const Deadline end = soon(); !end.expired() && (!epoch || epoch->number == 1);) {
      epoch = one.driver->begin(Deadline::after(100));
    }
    ASSERT_TRUE(epoch);
    EXPECT_EQ(epoch->met.group->identity().job.numbers(), (std::vector<int>{5, 7}));
  });
  all[1].driver->close();
  std::optional<ErrorRecord> error;
  for (const Deadline end = soon(); !end.expired() && !error;) {
    try {
      (void)all[2].driver->begin(Deadline::after(100));
    } catch (const Error& thrown) {
      error = thrown.record();
    }
  }
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, ErrorCode::QuorumLost) << error->text();
  EXPECT_EQ(error->rank, 7) << error->text();
  EXPECT_NE(error->summary.find("(rank 7 ("), std::string::npos) << error->text();
}

// ---- several members

/// Members that have met in epoch 1, each with an engine of its own in this process, and their drivers.
class Members {
 public:
  /// By default none of them counts as silent, however busy the machine is.
  explicit Members(int count, const AgreementDriver::Config& config = {}, int dead_after_ms = 60000) {
    std::vector<std::string> handles;
    for (int i = 0; i < count; ++i) {
      Group::Config of_groups = groupConfig(0, 1);
      of_groups.dead_after_ms = dead_after_ms;
      engines_.push_back(std::make_unique<Engine>());
      members_.push_back(std::make_unique<Reconfigurable>(*engines_.back(), of_groups));
      handles.push_back(members_.back()->handle());
    }
    drivers.resize(members_.size());
    std::barrier<> here(count);
    onAll([&](size_t i) {
      JoinAbort nobody;
      const auto met = members_[i]->meet(members_[i]->plan(1, handles), soon(), nobody);
      drivers[i] = AgreementDriver::open(*members_[i], met, config, [&] { here.arrive_and_wait(); });
    });
  }
  ~Members() {
    onAll([&](size_t i) { drivers[i]->close(); });
  }
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  /// Each on a thread of its own.
  void onAll(const std::function<void(size_t)>& body) const {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < members_.size(); ++i) {
      threads.emplace_back([&, i] { body(i); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
  /// All begin a step, in the same epoch.
  std::vector<AgreementDriver::Epoch> begin() const {
    std::vector<AgreementDriver::Epoch> epochs(members_.size());
    onAll([&](size_t i) { epochs[i] = drivers[i]->begin(soon()).value(); });
    for (const AgreementDriver::Epoch& epoch : epochs) {
      EXPECT_EQ(epoch.number, epochs.front().number);
    }
    return epochs;
  }
  /// What they agree on after a failure.
  std::vector<AgreementDriver::Verdict> verdicts(uint64_t epoch) const {
    std::vector<AgreementDriver::Verdict> found(members_.size());
    onAll([&](size_t i) { found[i] = drivers[i]->verdict(epoch, soon()).value(); });
    return found;
  }
  /// The commit round has ended on all: each commits by itself, or by the next view if another member was so much faster.
  void commit(uint64_t epoch, const AgreementDriver::Wish& all) const {
    for (const auto& driver : drivers) {
      EXPECT_TRUE(driver->committed(epoch, all) || driver->verdict(epoch, soon()).value().counts);
    }
  }
  [[nodiscard]] MemberHandle handle(size_t i) const {
    return MemberHandle::parse(members_[i]->handle());
  }
  [[nodiscard]] elastic::Incarnation name(size_t i) const {
    const ProcessId id = handle(i).incarnation;
    return {std::stoull(id.substr(0, 16), nullptr, 16), std::stoull(id.substr(16), nullptr, 16)};
  }
  [[nodiscard]] elastic::View firstView() const {
    elastic::View first;
    first.epoch = 1;
    for (size_t i = 0; i < members_.size(); ++i) {
      first.members.push_back(name(i));
    }
    return first;
  }
  [[nodiscard]] Visitor visitor(size_t i) const {
    return members_[i]->visitor();
  }
  [[nodiscard]] Engine& engine(size_t i) const {
    return *engines_[i];
  }
  [[nodiscard]] Reconfigurable& reconfigurable(size_t i) const {
    return *members_[i];
  }

  std::vector<std::shared_ptr<AgreementDriver>> drivers;

 private:
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::unique_ptr<Reconfigurable>> members_;
};

/// What a broken connection does to a group: nobody is dead.
void breakConnection(const AgreementDriver::Epoch& epoch) {
  ErrorRecord broken;
  broken.code = ErrorCode::ConnectionReset;
  broken.peer = 1;
  EXPECT_TRUE(epoch.met.group->fail(broken, soon()));
}

/// What a member says to which the group of that view has failed.
elastic::Message suspicionIn(const elastic::View& view) {
  elastic::Message message;
  message.epoch = view.epoch;
  message.view = view.id();
  message.cause = ErrorCode::ConnectionReset;
  return message;
}

/// Returns when the message has been taken.
void bring(Outbox& outbox, const elastic::Message& message) {
  outbox.push(encode(message));
  for (const Deadline end = soon(); !outbox.isIdle() && !end.expired();) {
    outbox.advance(Clock::now());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST(AgreementDriver, AMemberLeavesWithItsStepAndTheOthersGoOn) {
  const Members group(3);
  group.drivers[1]->leave();
  group.drivers[1]->leave();
  (void)group.begin();
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(group.drivers[i]->finished(1).value().leaves, i == 1);
    EXPECT_FALSE(group.drivers[i]->hasLeft());
  }
  group.commit(1, {.leaves = true, .admits = false});
  EXPECT_TRUE(group.drivers[1]->hasLeft());
  EXPECT_EQ(codeOf([&] { (void)group.drivers[1]->begin(soon()); }), ErrorCode::ShutDown);
  for (const size_t i : {0U, 2U}) {
    const auto epoch = group.drivers[i]->begin(soon());
    ASSERT_TRUE(epoch);
    EXPECT_EQ(epoch->number, 2U); // not in the one that ends behind that commit
    EXPECT_EQ(epoch->members, (std::vector<int>{0, 2}));
    EXPECT_EQ(epoch->changes, (elastic::Changes{.left = 1, .lost = 0, .joined = 0}));
    EXPECT_EQ(group.drivers[i]->steps(), 1);
  }
}

TEST(AgreementDriver, AllMembersMayLeaveAtOnce) {
  const Members group(3);
  group.onAll([&](size_t i) { group.drivers[i]->leave(); });
  (void)group.begin();
  group.onAll([&](size_t i) { EXPECT_TRUE(group.drivers[i]->finished(1).value().leaves); });
  group.commit(1, {.leaves = true, .admits = false});
  group.onAll([&](size_t i) {
    EXPECT_EQ(codeOf([&] { (void)group.drivers[i]->begin(soon()); }), ErrorCode::ShutDown);
    EXPECT_EQ(group.drivers[i]->steps(), 1);
  });
}

TEST(AgreementDriver, WhoLeavesStaysForAStepThatIsSummedAgain) {
  const Members group(3);
  group.drivers[1]->leave();
  const auto first = group.begin();
  EXPECT_TRUE(group.drivers[1]->finished(1).value().leaves);
  breakConnection(first[0]);
  for (const AgreementDriver::Verdict& verdict : group.verdicts(1)) {
    ASSERT_TRUE(verdict.again); // two have not finished it
    EXPECT_EQ(verdict.again->members, (std::vector<int>{0, 1, 2}));
  }
  EXPECT_FALSE(group.drivers[1]->hasLeft());
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(group.drivers[i]->finished(2).value().leaves, i == 1);
  }
  group.commit(2, {.leaves = true, .admits = false});
  EXPECT_TRUE(group.drivers[1]->hasLeft());
  EXPECT_EQ(group.drivers[2]->begin(soon()).value().members, (std::vector<int>{0, 2}));
}

TEST(AgreementDriver, WhoLeavesHasLeftIfItsRoundFailsAndTheStepCounts) {
  const Members group(3);
  group.drivers[0]->leave();
  const auto first = group.begin();
  group.onAll([&](size_t i) { EXPECT_TRUE(group.drivers[i]->finished(1)); });
  breakConnection(first[2]);
  for (const AgreementDriver::Verdict& verdict : group.verdicts(1)) {
    EXPECT_TRUE(verdict.counts);
  }
  EXPECT_TRUE(group.drivers[0]->hasLeft());
  EXPECT_EQ(codeOf([&] { (void)group.drivers[0]->begin(soon()); }), ErrorCode::ShutDown);
  for (const size_t i : {1U, 2U}) {
    EXPECT_EQ(group.drivers[i]->begin(soon()).value().members, (std::vector<int>{1, 2}));
    EXPECT_EQ(group.drivers[i]->begin(soon()).value().changes.left, 1);
  }
}

TEST(AgreementDriver, NobodyLeavesBetweenSteps) {
  const Members group(2);
  const auto first = group.begin();
  group.onAll([&](size_t i) {
    EXPECT_TRUE(group.drivers[i]->finished(1));
    EXPECT_TRUE(group.drivers[i]->committed(1, {}));
  });
  group.drivers[1]->leave();
  breakConnection(first[0]);
  group.onAll([&](size_t i) {
    auto second = group.drivers[i]->begin(soon()).value();
    for (const Deadline end = soon(); second.number == 1 && !end.expired();) { // it has not noticed yet
      second = group.drivers[i]->begin(soon()).value();
    }
    EXPECT_EQ(second.number, 2U);
    EXPECT_EQ(second.members, (std::vector<int>{0, 1}));
  });
}

// ---- the rules of one epoch

TEST(AgreementDriver, AStepThatFinishesBeforeTheSealCountsAndNoneBehindIt) {
  const Members group(2);
  const auto first = group.begin();
  {
    const ArmedFaults seals("survive.seal:1+:hold");
    breakConnection(first[0]);
    ArmedFaults::waitUntilStruck(2); // each is about to seal
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(group.drivers[i]->isOver(first[i]));
      EXPECT_TRUE(group.drivers[i]->finished(1)); // its buckets had ended well
    }
  }
  for (const AgreementDriver::Verdict& verdict : group.verdicts(1)) {
    EXPECT_TRUE(verdict.counts);
  }
  const auto second = group.begin();
  {
    const ArmedFaults meetings("survive.meet:1+:hold");
    breakConnection(second[0]);
    ArmedFaults::waitUntilStruck(2); // each has sealed
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_FALSE(group.drivers[i]->finished(2)); // too late
      EXPECT_FALSE(group.drivers[i]->committed(2, {}));
    }
  }
  for (const AgreementDriver::Verdict& verdict : group.verdicts(2)) {
    EXPECT_FALSE(verdict.counts);
  }
}

TEST(AgreementDriver, NothingCountsBehindTheSeal) {
  const Members group(2);
  const auto first = group.begin();
  {
    const ArmedFaults one("survive.seal:2:hold,survive.sealed:1000000:delay=0");
    breakConnection(first[0]);
    ArmedFaults::waitUntilStruck();
    ArmedFaults::waitUntilVisited(); // by the other member
    const int in_time = static_cast<int>(group.drivers[0]->finished(1).has_value()) +
        static_cast<int>(group.drivers[1]->finished(1).has_value());
    EXPECT_EQ(in_time, 1); // of the member that has not sealed
  }
  for (const AgreementDriver::Verdict& verdict : group.verdicts(1)) {
    EXPECT_FALSE(verdict.counts);
  }
}

TEST(AgreementDriver, AMemberThatClosesDuringAMeetingLeavesNobodyBehind) {
  for (int times = 0; times < 10; ++times) { // one of three is at the moment that counts
    const Members group(2);
    {
      const ArmedFaults meetings("survive.meet:1+:delay=1");
      breakConnection(group.begin()[0]);
      ArmedFaults::waitUntilStruck(2);
    }
    group.drivers[1]->close();
    std::vector<int> members;
    const auto raised = codeOf([&] {
      for (const Deadline end = soon(); members.size() != 1 && !end.expired();) {
        const auto epoch = group.drivers[0]->begin(Deadline::after(100));
        members = epoch ? epoch->members : members;
      }
    });
    ASSERT_EQ(raised, std::nullopt);
    ASSERT_EQ(members, std::vector<int>{0});
  }
}

// A member on a busy machine may learn from another one that the epoch is over before its own group has failed.
TEST(AgreementDriver, AFailureThatComesLateEndsNoLaterEpoch) {
  const Members group(2);
  const auto first = group.begin();
  {
    const ArmedFaults seals("survive.seal:1+:hold"); // in which that comes
    Outbox outbox(group.handle(0), group.visitor(1));
    elastic::Message message = suspicionIn(group.firstView());
    message.from = group.name(1);
    bring(outbox, message);
    ArmedFaults::waitUntilStruck();
    breakConnection(first[0]);
  }
  for (const AgreementDriver::Verdict& verdict : group.verdicts(1)) {
    ASSERT_TRUE(verdict.again);
    EXPECT_EQ(verdict.again->number, 2U);
  }
}

TEST(AgreementDriver, AllOperationsOfAnEpochHaveEndedBeforeTheNextBegins) {
  const Members group(3);
  const auto first = group.begin();
  std::vector<float> values(1000);
  const auto operation = first[0].met.group->start(testing::allReduceCall(values)); // the others do not come
  group.drivers[1]->leave();
  const ArmedFaults closes("group.close:1+:delay=1500"); // which ends operations, too
  for (const auto& driver : group.drivers) {
    EXPECT_TRUE(driver->finished(1));
  }
  group.commit(1, {.leaves = true, .admits = false});
  EXPECT_EQ(group.drivers[0]->begin(soon()).value().number, 2U);
  EXPECT_TRUE(operation->error());
}

TEST(AgreementDriver, AnErrorOfTheProgramChangesNoMembers) {
  const Members group(3);
  const auto first = group.begin();
  ErrorRecord mismatch;
  mismatch.code = ErrorCode::CollectiveMismatch;
  mismatch.peer = 1;
  first[0].met.group->abort(mismatch);
  group.onAll([&](size_t i) {
    const auto raised = codeOf([&] { (void)group.drivers[i]->verdict(1, soon()); });
    EXPECT_EQ(raised, ErrorCode::CollectiveMismatch);
    EXPECT_EQ(codeOf([&] { (void)group.drivers[i]->begin(soon()); }), raised);
  });
}

TEST(AgreementDriver, AMemberThatCannotMeetSaysSoAndTheOthersGoOn) {
  const Members group(3);
  const auto first = group.begin();
  armFaultPoints("reconfigure.call:1:errno=EMFILE");
  breakConnection(first[0]);
  std::vector<std::optional<ErrorCode>> raised(3);
  std::vector<size_t> sizes(3);
  group.onAll([&](size_t i) {
    raised[i] = codeOf([&] { sizes[i] = group.drivers[i]->verdict(1, soon()).value().again->members.size(); });
  });
  armFaultPoints("");
  EXPECT_EQ(std::count(raised.begin(), raised.end(), std::optional(ErrorCode::SystemError)), 1);
  EXPECT_EQ(std::count(raised.begin(), raised.end(), std::nullopt), 2);
  EXPECT_EQ(std::count(sizes.begin(), sizes.end(), 2U), 2);
}

TEST(AgreementDriver, WhatItHasPromisedIsKeptWhereOthersReadIt) {
  const Members group(2);
  const auto first = group.begin();
  const Witness witness = Witness::of(
      group.handle(1),
      group.engine(1).localPeers().name(),
      recordKey(group.handle(1).incarnation, nullptr),
      Deadline::after(3000));
  EXPECT_EQ(witness.record().value().view.epoch, 1U);
  breakConnection(first[0]);
  (void)group.verdicts(1);
  EXPECT_EQ(witness.record().value().view.epoch, 2U);
  EXPECT_EQ(witness.record().value().past.size(), 1U);
}

/// The control loop of an engine stands still, as that of a process that was stopped does, for as long as this lives.
class Stopped {
 public:
  explicit Stopped(Engine& engine) {
    const auto stands = std::make_shared<std::promise<void>>();
    engine.control().post([stands, goes_on = goes_on_.get_future().share()]() noexcept {
      stands->set_value();
      (void)goes_on.wait_for(std::chrono::seconds(30));
    });
    stands->get_future().wait();
  }
  ~Stopped() {
    goes_on_.set_value();
  }
  Stopped(const Stopped&) = delete;
  Stopped& operator=(const Stopped&) = delete;

 private:
  std::promise<void> goes_on_;
};

// A member is found silent as long after its last heartbeat as the detector would have found it, if it does not take part in the agreement.
TEST(AgreementDriver, WhatAMemberSaysBeforeTheEndOfAnEpochHidesNoSilence) {
  const Members group(3, {}, 6000);
  breakConnection(group.begin()[0]);
  (void)group.verdicts(1);
  group.onAll([&](size_t i) { EXPECT_TRUE(group.drivers[i]->finished(2)); });
  group.commit(2, {}); // else the next break would cost member 1 its place
  const auto second = group.begin();
  const Stopped stopped(group.engine(2));
  elastic::Message late;
  late.kind = elastic::Message::Kind::Decide;
  late.from = group.name(2);
  late.epoch = 2;
  late.next = group.firstView();
  elastic::Message pong = late; // as of too few members
  pong.kind = elastic::Message::Kind::Pong;
  for (const size_t to : {0U, 1U}) {
    Outbox outbox(group.handle(to), group.visitor(2));
    bring(outbox, pong);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(4000)); // of the 6000 after which a member counts as silent
  const TimePoint began = Clock::now();
  breakConnection(second[0]);
  std::this_thread::sleep_for(std::chrono::milliseconds(500)); // the agreement has begun
  for (const size_t to : {0U, 1U}) {
    Outbox outbox(group.handle(to), group.visitor(2));
    bring(outbox, late);
  }
  group.onAll([&](size_t i) {
    if (i != 2) {
      const auto verdict = group.drivers[i]->verdict(2, soon());
      EXPECT_EQ(verdict.value().again.value().members, (std::vector<int>{0, 1}));
    }
  });
  EXPECT_WITHIN_MS(testing::elapsedMs(began), 4500); // 2000 are left
}

// A member has never heard one that is no neighbour of it in the group.
TEST(AgreementDriver, TwoMembersThatFallSilentAtOnceCostNoMoreThanOne) {
  const Members group(8, {}, 3000);
  (void)group.begin();
  const Stopped one(group.engine(6));
  const Stopped another(group.engine(7));
  const TimePoint began = Clock::now();
  group.onAll([&](size_t i) {
    if (i < 6) {
      const auto verdict = group.drivers[i]->verdict(1, soon());
      EXPECT_EQ(verdict.value().again.value().members, (std::vector<int>{0, 1, 2, 3, 4, 5}));
    }
  });
  EXPECT_WITHIN_MS(testing::elapsedMs(began), 5000); // 6100 if one is waited for after the other
}

// Of the lowest member all wait for a proposal, then who proposes in its place waits for its promise.
TEST(AgreementDriver, AMemberThatStopsAfterItsAnswerIsFoundSilent) {
  const Members group(4, {}, 4000);
  (void)group.begin();
  const Stopped stopped(group.engine(0));
  elastic::Message suspicion = suspicionIn(group.firstView());
  suspicion.from = group.name(0);
  elastic::Message pong = suspicion;
  pong.kind = elastic::Message::Kind::Pong;
  pong.nonce = 1; // of the first agreement
  for (const size_t to : {1U, 2U, 3U}) {
    Outbox outbox(group.handle(to), group.visitor(0));
    bring(outbox, suspicion);
    bring(outbox, pong);
  }
  const TimePoint began = Clock::now();
  group.onAll([&](size_t i) {
    if (i != 0) {
      const auto verdict = group.drivers[i]->verdict(1, soon());
      EXPECT_EQ(verdict.value().again.value().members, (std::vector<int>{1, 2, 3}));
    }
  });
  EXPECT_WITHIN_MS(testing::elapsedMs(began), 9000); // 12000, if it is waited for in each of its parts
}

// A member's last word may be as old as the time after which it sends the next one, when the pause begins.
TEST(AgreementDriver, APauseThatIsShorterThanASilenceCostsNobodyItsPlace) {
  const Members group(4, {}, 4000);
  (void)group.begin();
  elastic::Message suspicion = suspicionIn(group.firstView());
  suspicion.from = group.name(0);
  elastic::Message pong = suspicion;
  pong.kind = elastic::Message::Kind::Pong;
  pong.nonce = 1; // of the first agreement
  const auto say = [&] {
    for (const size_t to : {1U, 2U, 3U}) {
      Outbox outbox(group.handle(to), group.visitor(0));
      bring(outbox, suspicion);
      bring(outbox, pong);
    }
  };
  {
    const Stopped stopped(group.engine(0));
    say();
    std::this_thread::sleep_for(
        std::chrono::milliseconds(4800)); // the next word is due after 1.2 s, and the pause takes 3.6
    say();
  }
  for (const AgreementDriver::Verdict& verdict : group.verdicts(1)) {
    EXPECT_EQ(verdict.again.value().members, (std::vector<int>{0, 1, 2, 3}));
  }
}

TEST(AgreementDriver, AProcessThatWasStoppedReadsWhatHasComeBeforeItFindsOthersSilent) {
  const Members group(2, {}, 2000);
  const auto first = group.begin();
  elastic::Message word = suspicionIn(group.firstView());
  word.from = group.name(1);
  Outbox outbox(group.handle(0), group.visitor(1));
  {
    const Stopped stopped(group.engine(1));
    const ArmedFaults stops("survive.stop_giving:1:hold"); // where the agreement of member 0 begins
    breakConnection(first[0]);
    ArmedFaults::waitUntilStruck();
    std::this_thread::sleep_for(std::chrono::milliseconds(1000));
    bring(outbox, word);
    std::this_thread::sleep_for(std::chrono::milliseconds(1100)); // just longer than a silence since the last heartbeat
  }
  for (const AgreementDriver::Verdict& verdict : group.verdicts(1)) {
    EXPECT_EQ(verdict.again.value().members, (std::vector<int>{0, 1}));
  }
}

TEST(AgreementDriver, AMemberSpeaksForItselfOnly) {
  const Members group(3);
  elastic::Message message = suspicionIn(group.firstView());
  message.cause = ErrorCode::PeerDead;
  Outbox outbox(group.handle(0), group.visitor(1));
  const auto say = [&](size_t as) {
    message.from = group.name(as);
    bring(outbox, message);
    std::this_thread::sleep_for(std::chrono::milliseconds(300)); // in which the members could have agreed
  };
  say(2);
  EXPECT_EQ(group.begin()[0].number, 1U);
  say(1); // else the test would notice nothing
  group.onAll([&](size_t i) {
    uint64_t number = 1;
    for (const Deadline end = soon(); number == 1 && !end.expired();) {
      number = group.drivers[i]->begin(soon()).value().number;
    }
    EXPECT_EQ(number, 2U);
  });
}

// ---- processes that want to join

AgreementDriver::Config joinable(const testing::TempFolder& folder, AgreementDriver::Config config = {}) {
  config.peers_path = (folder.path() / "peers").string();
  config.description = "a model";
  return config;
}

TEST(AgreementDriver, ASlowDiskHoldsUpNoChangeOfMembers) {
  const testing::TempFolder folder;
  const Members group(2, joinable(folder));
  (void)group.begin();
  const ArmedFaults disk("survive.peers:1+:hold");
  const TimePoint began = Clock::now();
  for (uint64_t epoch = 1; epoch <= 2; ++epoch) {
    breakConnection(group.begin()[0]);
    for (const AgreementDriver::Verdict& verdict : group.verdicts(epoch)) {
      ASSERT_TRUE(verdict.again);
      ASSERT_EQ(verdict.again->number, epoch + 1);
    }
    group.onAll([&](size_t i) { EXPECT_TRUE(group.drivers[i]->finished(epoch + 1)); });
    group.commit(epoch + 1, {});
  }
  EXPECT_WITHIN_MS(testing::elapsedMs(began), 30000); // the disk holds for 60 s
}

TEST(AgreementDriver, AnswersNobodyOnceItHasEnded) {
  const testing::TempFolder folder;
  const Members group(1, joinable(folder));
  Alone stranger;
  std::string missing;
  const auto ask = [&] {
    return AgreementDriver::ask({group.handle(0).text()}, stranger.members.visitor(), Deadline::after(5000), missing);
  };
  EXPECT_EQ(ask().value().description, "a model");
  group.drivers[0]->close(); // its group, and the program, may live on
  EXPECT_FALSE(ask());
  EXPECT_NE(missing.find("no elastic training"), std::string::npos) << missing;
}

TEST(AgreementDriver, TheLastOfManyMembersIsAskedIfTheOthersAreSilent) {
  const testing::TempFolder folder;
  const Members group(1, joinable(folder));
  Alone stranger;
  const Listener silent = Listener::bind(SocketAddress::loopback(AddressFamily::IPv4), {}); // nobody accepts
  std::vector<std::string> handles;
  for (int i = 0; i < 3; ++i) {
    MemberHandle gone = group.handle(0);
    gone.incarnation = newProcessId();
    gone.unix_socket.clear();
    gone.addresses = {silent.address()};
    handles.push_back(gone.text());
  }
  handles.push_back(group.handle(0).text());
  std::string missing;
  EXPECT_TRUE(AgreementDriver::ask(handles, stranger.members.visitor(), Deadline::after(6000), missing)) << missing;
}

TEST(AgreementDriver, MembersWithAnotherSecretAreNotAsked) {
  const testing::TempFolder folder;
  const Members group(1, joinable(folder));
  Alone stranger;
  MemberHandle closed = group.handle(0);
  closed.key_id = "0123456789abcdef";
  std::string missing;
  EXPECT_EQ(
      codeOf([&] {
        (void)AgreementDriver::ask({closed.text()}, stranger.members.visitor(), Deadline::after(3000), missing);
      }),
      ErrorCode::ConfigMismatch);
}

// ---- the same without a handle: at a port that all know

/// Members of one host, which are to be found at a port of it.
class FoundAtPort {
 public:
  explicit FoundAtPort(int count) : members(count, config()) {
    for (size_t i = 0; i < members.drivers.size(); ++i) {
      const auto offers = members.reconfigurable(i).offer(at, soon());
      EXPECT_FALSE(offers.empty()); // that of the name first, then those of the endpoint
      busy.push_back(offers.empty() ? "not offered" : offers.front().busy);
    }
  }
  /// How many members there are, as the one says that answers; 0 if none does.
  size_t ask() {
    missing.clear();
    const auto notice = AgreementDriver::ask(at, stranger.members.visitor(), Deadline::after(5000), missing);
    EXPECT_TRUE(!notice || notice->description == "a model");
    return notice ? notice->members.size() : 0;
  }
  /// The same as soon as one answers.
  size_t waitForAnswer() {
    const TimePoint began = Clock::now();
    size_t found = 0;
    for (const Deadline end = soon(); found == 0 && !end.expired();) {
      found = ask();
    }
    EXPECT_WITHIN_MS(testing::elapsedMs(began), 2 * Endpoint::kOfferAgain.count()) << missing;
    return found;
  }

  const testing::ReservedPort port;
  const FixedPort at{{"127.0.0.1"}, port.number()};
  Members members;
  Alone stranger;
  std::vector<std::string> busy; ///< by member: why it does not listen there
  std::string missing; ///< who has not answered

 private:
  static AgreementDriver::Config config() {
    AgreementDriver::Config config;
    config.has_port = true;
    config.description = "a model";
    return config;
  }
};

TEST(FixedPort, OneMemberOfAHostAnswersThereForAll) {
  FoundAtPort host(3);
  EXPECT_EQ(host.busy[0], "");
  for (const size_t i : {1U, 2U}) {
    EXPECT_NE(host.busy[i].find("EADDRINUSE"), std::string::npos) << host.busy[i];
  }
  EXPECT_EQ(host.ask(), 3U);
  const FixedPort elsewhere{{"not-a-host"}, host.at.port};
  EXPECT_TRUE(host.members.reconfigurable(0).offer(elsewhere, Deadline::after(100)).empty());
}

TEST(FixedPort, TheNextMemberTakesItWhenOneHasEnded) {
  FoundAtPort host(3);
  host.members.drivers[0]->close(); // its group, and the program, may live on
  EXPECT_GE(host.waitForAnswer(), 2U); // three until the others have noticed
  host.members.drivers[1]->close();
  EXPECT_GE(host.waitForAnswer(), 1U);
  host.members.drivers[2]->close();
  std::this_thread::sleep_for(2 * Endpoint::kOfferAgain);
  EXPECT_EQ(host.ask(), 0U);
  EXPECT_NE(host.missing.find("127.0.0.1 (127.0.0.1:"), std::string::npos) << host.missing;
}

TEST(FixedPort, TheNextMemberTakesItWhenOneHasLeft) {
  FoundAtPort host(2);
  host.members.drivers[0]->leave();
  (void)host.members.begin();
  for (const auto& driver : host.members.drivers) {
    (void)driver->finished(1);
  }
  host.members.commit(1, {.leaves = true, .admits = false});
  EXPECT_TRUE(host.members.drivers[0]->hasLeft());
  EXPECT_GE(host.waitForAnswer(), 1U);
}

// All else is asked at the endpoint of a process that one knows.
TEST(FixedPort, AnswersOneQuestion) {
  const FoundAtPort host(1);
  const Visitor from = host.stranger.members.visitor();
  const MemberHandle to = FixedPort::listenerAt(SocketAddress::loopback(AddressFamily::IPv4, host.at.port), from.self);
  const ProcessId member = host.members.handle(0).incarnation;
  const std::string self = from.self.text();
  const AbortToken none;
  const auto ask = [&](const std::vector<std::string_view>& words) {
    const Dialed dialed = dial(to, from, soon(), none);
    EXPECT_NE(dialed.link, nullptr) << dialed.why;
    const std::string answer = askEndpoint(*dialed.link, words, soon(), none).front();
    EXPECT_EQ(codeOf([&] { (void)askEndpoint(*dialed.link, words, soon(), none); }), ErrorCode::ConnectionReset);
    return answer;
  };
  EXPECT_EQ(ask({endpoint_request::kAgree, member, from.self.incarnation, self}), endpoint_answer::kGone);
  EXPECT_EQ(ask({endpoint_request::kSay, "a message"}), endpoint_answer::kGone);
  EXPECT_EQ(
      ask({endpoint_request::kEnter, member, from.self.incarnation, "instance", "1", "0"}), endpoint_answer::kGone);
  EXPECT_EQ(ask({endpoint_request::kWho}), endpoint_answer::kGone);
  EXPECT_EQ(ask({endpoint_request::kWho, ""}), endpoint_answer::kHere);
  const Dialed at_endpoint = dial(host.members.handle(0), from, soon(), none);
  ASSERT_NE(at_endpoint.link, nullptr) << at_endpoint.why;
  EXPECT_EQ(askEndpoint(*at_endpoint.link, {endpoint_request::kWho, ""}, soon(), none).front(), endpoint_answer::kGone);
}

TEST(FixedPort, AnotherPrograms) {
  Alone stranger;
  std::string missing;
  const Listener silent = Listener::bind(SocketAddress::loopback(AddressFamily::IPv4), {});
  const FixedPort at{{"127.0.0.1", "not-a-host"}, silent.address().port()};
  const TimePoint began = Clock::now();
  EXPECT_FALSE(AgreementDriver::ask(at, stranger.members.visitor(), Deadline::after(1500), missing));
  EXPECT_WITHIN_MS(testing::elapsedMs(began), 5000);
  EXPECT_NE(missing.find("127.0.0.1 (" + silent.address().text() + "): "), std::string::npos) << missing;
  EXPECT_NE(missing.find("not-a-host: this name has no address"), std::string::npos) << missing;
}

/// One round of all members in this epoch. Whether all admit.
bool makeRound(const Members& group, uint64_t epoch) {
  AgreementDriver::Wish all{.leaves = false, .admits = true};
  for (const auto& driver : group.drivers) {
    all.admits = driver->finished(epoch).value().admits && all.admits;
  }
  group.commit(epoch, all);
  return all.admits;
}

void stepUntilAnAdmissionIsDue(const Members& group) {
  for (const Deadline end = soon(); !group.drivers[0]->admissionIsDue();) {
    ASSERT_FALSE(end.expired()) << "no newcomer was reached";
    (void)makeRound(group, group.begin().front().number);
  }
}

AgreementDriver::Epoch beginAdmission(const Members& group) {
  const AgreementDriver::Epoch epoch = group.drivers[0]->present(soon()).value();
  group.onAll([&](size_t i) { EXPECT_TRUE(group.drivers[i]->beginAdmission(epoch.number)); });
  return epoch;
}

/// The members train until they stop for a newcomer, in this epoch.
AgreementDriver::Epoch stopForNewcomers(const Members& group) {
  stepUntilAnAdmissionIsDue(group);
  const AgreementDriver::Epoch epoch = beginAdmission(group);
  EXPECT_TRUE(makeRound(group, epoch.number));
  return epoch;
}

/// Members, and a process that waits for them to let it in.
struct Joining {
  explicit Joining(int count, const AgreementDriver::Config& of_members = {}, int dead_after_ms = 60000)
      : config(joinable(folder, of_members)), group(count, config, dead_after_ms) {
    std::vector<MemberHandle> handles;
    for (size_t i = 0; i < group.drivers.size(); ++i) {
      handles.push_back(group.handle(i));
    }
    newcomer = AgreementDriver::askToJoin(stranger.members, handles, config);
  }
  ~Joining() {
    newcomer->close();
  }
  Joining(const Joining&) = delete;
  Joining& operator=(const Joining&) = delete;

  const testing::TempFolder folder;
  const AgreementDriver::Config config;
  const Members group;
  Alone stranger;
  std::shared_ptr<AgreementDriver> newcomer;
};

TEST(AgreementDriver, ARankThatSkipsAnEpochKnowsWhoCameAndWent) {
  const Joining joining(1);
  const Members& group = joining.group;
  const auto& newcomer = joining.newcomer;
  AgreementDriver& member = *group.drivers[0];
  (void)stopForNewcomers(group);
  EXPECT_EQ(member.newcomers(soon()), 1U);
  EXPECT_EQ(member.ranksWithNewcomers(), 2U);
  member.give("a state");
  const auto state = newcomer->arrive(soon()).state;
  ASSERT_TRUE(state);
  newcomer->loaded();
  ASSERT_TRUE(newcomer->arrive(soon()).admitted);
  newcomer->close(); // before the member begins again
  std::optional<AgreementDriver::Epoch> epoch;
  for (const Deadline end = soon(); !end.expired() && (!epoch || epoch->number == 2U);) {
    epoch = member.begin(Deadline::after(100));
  }
  ASSERT_TRUE(epoch);
  EXPECT_EQ(epoch->number, 3U);
  EXPECT_EQ(epoch->members, std::vector<int>{0});
  EXPECT_EQ(epoch->changes, (elastic::Changes{.left = 0, .lost = 1, .joined = 1}));
}

/// Whether no member has begun a step, as they say once this has ended the epoch.
bool nothingIsUnderWay(const Members& group, const std::function<void()>& end_epoch) {
  static std::mutex mutex;
  static std::string lines;
  {
    const std::lock_guard<std::mutex> lock(mutex); // a sink of before may still run
    lines.clear();
  }
  setLogSink(
      [](LogLevel, const char* line) {
        const std::lock_guard<std::mutex> lock(mutex);
        lines += std::string(line) + "\n";
      },
      LogLevel::Info);
  const std::string step = "step " + std::to_string(group.drivers[0]->steps() + 1);
  end_epoch();
  const auto has = [](const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex);
    return lines.find(text) != std::string::npos;
  };
  for (const Deadline end = soon(); !has(step + " is ") && !end.expired();) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  setLogSink(nullptr, LogLevel::Warn);
  const std::lock_guard<std::mutex> lock(mutex);
  const bool found = lines.find(step + " is next") != std::string::npos;
  EXPECT_TRUE(found) << lines;
  return found;
}

TEST(AgreementDriver, AnAdmissionWhoseEpochEndsIsDroppedAndNothingIsUnderWay) {
  const Joining joining(2);
  const Members& group = joining.group;
  stepUntilAnAdmissionIsDue(group);
  const AgreementDriver::Epoch last = beginAdmission(group);
  EXPECT_TRUE(nothingIsUnderWay(group, [&] { breakConnection(last); }));
  group.onAll([&](size_t i) {
    const auto verdict = group.drivers[i]->verdict(last.number, soon());
    ASSERT_TRUE(verdict);
    EXPECT_FALSE(verdict->counts);
    EXPECT_FALSE(verdict->again);
  });
  EXPECT_TRUE(nothingIsUnderWay(group, [&] { group.drivers[1]->close(); }));
}

TEST(AgreementDriver, AnAdmissionThatIsNotDueInTheNextEpochDoesNotBegin) {
  const Joining joining(2);
  const Members& group = joining.group;
  stepUntilAnAdmissionIsDue(group);
  AgreementDriver& member = *group.drivers[0];
  AgreementDriver::Epoch epoch = member.present(soon()).value();
  const uint64_t last = epoch.number;
  breakConnection(epoch);
  for (const Deadline end = soon(); epoch.number == last && !end.expired();) {
    epoch = member.present(Deadline::after(100)).value_or(epoch);
  }
  ASSERT_EQ(epoch.number, last + 1);
  EXPECT_FALSE(member.beginAdmission(last));
  EXPECT_FALSE(member.beginAdmission(epoch.number));
  EXPECT_TRUE(nothingIsUnderWay(group, [&] { group.drivers[1]->close(); }));
}

AgreementDriver::Config withAtLeast(size_t ranks) {
  AgreementDriver::Config config;
  config.min_ranks = ranks;
  return config;
}

// A last forward pass, which trains nothing, needs no members.
TEST(AgreementDriver, NobodyIsLetInBehindTheEnd) {
  const Members group(1);
  group.drivers[0]->close();
  EXPECT_EQ(group.drivers[0]->newcomers(soon()), 0U);
  EXPECT_EQ(codeOf([&] { (void)group.drivers[0]->begin(soon()); }), ErrorCode::ShutDown);
}

TEST(AgreementDriver, TooFewMembersGiveTheirStateAlsoIfAnAdmissionWasUnderWay) {
  const Joining joining(2, withAtLeast(2));
  AgreementDriver& member = *joining.group.drivers[0];
  stepUntilAnAdmissionIsDue(joining.group);
  const uint64_t last = member.present(soon()).value().number;
  EXPECT_TRUE(member.beginAdmission(last));
  const ArmedFaults slow("survive.install:1+:delay=300"); // the program goes on before the newcomer is shown
  joining.group.drivers[1]->close();
  const auto verdict = member.verdict(last, soon());
  ASSERT_TRUE(verdict);
  EXPECT_FALSE(verdict->counts || verdict->again);
  EXPECT_EQ(member.newcomers(soon()), 1U);
  EXPECT_EQ(codeOf([&] { (void)member.begin(Deadline::after(500)); }), std::nullopt);
}

TEST(AgreementDriver, TooFewMembersGiveTheirStateAlsoIfAnAdmissionWasDue) {
  const Joining joining(2, withAtLeast(2));
  AgreementDriver& member = *joining.group.drivers[0];
  stepUntilAnAdmissionIsDue(joining.group);
  const uint64_t last = member.present(soon()).value().number;
  joining.group.drivers[1]->close();
  std::optional<AgreementDriver::Epoch> epoch;
  for (const Deadline end = soon(); !end.expired() && (!epoch || epoch->number == last);) {
    epoch = member.present(Deadline::after(100)); // which waits for no newcomers
  }
  ASSERT_TRUE(epoch);
  EXPECT_EQ(epoch->members, std::vector<int>{0});
  EXPECT_FALSE(member.begin(Deadline::after(100)));
  EXPECT_EQ(member.newcomers(soon()), 1U);
}

TEST(AgreementDriver, TooFewMembersGiveTheirStateAlsoIfOneDiesJustBehindAnAdmission) {
  const Joining joining(2, withAtLeast(2));
  AgreementDriver& member = *joining.group.drivers[0];
  (void)stopForNewcomers(joining.group);
  const ArmedFaults slow("survive.stop_giving:1:delay=500"); // the program goes on while the members change
  joining.group.drivers[1]->close();
  ArmedFaults::waitUntilStruck();
  EXPECT_EQ(member.newcomers(soon()), 1U);
}

/// Until this member knows that it is the only one, and too few.
void waitUntilAlone(AgreementDriver& member) {
  for (const Deadline end = soon(); member.newcomers(Deadline::after(100)) == 0U;) {
    ASSERT_FALSE(end.expired());
  }
}

TEST(AgreementDriver, TooFewMembersWaitForAProcessThatComesLater) {
  const testing::TempFolder folder;
  const AgreementDriver::Config config = joinable(folder, withAtLeast(2));
  const Members group(2, config);
  AgreementDriver& member = *group.drivers[0];
  group.drivers[1]->close();
  waitUntilAlone(member);
  Alone stranger;
  const auto newcomer = AgreementDriver::askToJoin(stranger.members, {group.handle(0)}, config);
  EXPECT_EQ(member.newcomers(soon()), 1U);
  newcomer->close();
}

TEST(AgreementDriver, ANewcomerThatTheStateDidNotReachGetsItWhenItAsksAgain) {
  AgreementDriver::Config config = withAtLeast(2);
  config.quorum_wait_ms = 60000;
  const Joining joining(2, config);
  AgreementDriver& member = *joining.group.drivers[0];
  joining.group.drivers[1]->close();
  waitUntilAlone(member);
  ASSERT_EQ(member.newcomers(soon()), 1U);
  {
    const ArmedFaults breaks("survive.give:1:errno=ECONNRESET");
    member.give("a state");
  }
  EXPECT_EQ(member.newcomers(soon()), 1U);
  member.give("a state");
  EXPECT_TRUE(joining.newcomer->arrive(soon()).state);
}

// The members wait for as long as each newcomer needs, up to join_pause: what an earlier stop has left of that does not count.
TEST(AgreementDriver, AnEarlierStopTakesNoTimeFromThoseThatTooFewWaitFor) {
  AgreementDriver::Config config = withAtLeast(2);
  config.join_pause_ms = 3000;
  const Joining joining(2, config);
  AgreementDriver& member = *joining.group.drivers[0];
  joining.group.drivers[1]->leave();
  const uint64_t last = joining.group.begin().front().number;
  for (const auto& driver : joining.group.drivers) {
    (void)driver->finished(last);
  }
  joining.group.commit(last, {.leaves = true, .admits = false}); // the members stop behind this
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  ASSERT_EQ(member.newcomers(soon()), 1U);
  std::this_thread::sleep_for(std::chrono::milliseconds(2000)); // so long the state is read
  member.give("a state");
  EXPECT_TRUE(joining.newcomer->arrive(soon()).state);
}

// The others would wait for each of its next groups.
TEST(AgreementDriver, AMemberWithoutMemoryForItsOwnWorkLeavesTheOthers) {
  const ArmedFaults memory("survive.witness:1:nomem");
  const Joining joining(2); // of which the members look for a record
  size_t raised = 0;
  size_t alone = 0;
  for (const Deadline end = soon(); (raised == 0 || alone == 0) && !end.expired();) {
    raised = alone = 0;
    for (const auto& driver : joining.group.drivers) {
      const auto error = codeOf([&] {
        const auto epoch = driver->begin(Deadline::after(100));
        alone += epoch && epoch->members.size() == 1 ? 1 : 0;
      });
      raised += error ? 1 : 0;
    }
  }
  EXPECT_EQ(raised, 1U);
  EXPECT_EQ(alone, 1U);
}

TEST(AgreementDriver, ALengthOfAStateOfWhichNothingComesTakesNoMemory) {
  const Joining joining(1);
  Alone other;
  const MemberHandle to = joining.stranger.members.visitor().self;
  const Visitor from = other.members.visitor();
  const AbortToken none;
  const Dialed dialed = dial(to, from, soon(), none);
  ASSERT_NE(dialed.link, nullptr) << dialed.why;
  const auto ask = [&](const std::vector<std::string_view>& words) {
    return askEndpoint(*dialed.link, words, soon(), none).front();
  };
  const std::string self = from.self.text();
  EXPECT_EQ(ask({endpoint_request::kGive, to.incarnation, from.self.incarnation, self}), endpoint_answer::kHere);
  EXPECT_EQ(
      ask({endpoint_request::kState, "begin", "0", "0", "1", "4611686018427387904", "0"}), endpoint_answer::kHere);
  EXPECT_EQ(ask({endpoint_request::kState, "part", "bytes"}), endpoint_answer::kHere);
}

// Rank 0 of members that have gone on without it may not know that yet.
TEST(AgreementDriver, ARefusalInTheNameOfEarlierMembersCountsForNothing) {
  const Joining joining(1);
  Alone other;
  const MemberHandle to = joining.stranger.members.visitor().self;
  const Visitor from = other.members.visitor();
  const AbortToken none;
  const auto say = [&](const std::vector<std::vector<std::string_view>>& requests) {
    const Dialed dialed = dial(to, from, soon(), none);
    const std::string self = from.self.text();
    (void)askEndpoint(
        *dialed.link, {endpoint_request::kGive, to.incarnation, from.self.incarnation, self}, soon(), none);
    for (const auto& words : requests) {
      (void)askEndpoint(*dialed.link, words, soon(), none);
    }
  };
  const std::string_view state = endpoint_request::kState;
  say({{state, "begin", "3", "77", "5", "7", "0"}, {state, "part", "a state"}});
  EXPECT_EQ(joining.newcomer->arrive(soon()).state.value().bytes, "a state");
  say({{state, "refuse", "4", "no time"}});
  EXPECT_EQ(codeOf([&] { (void)joining.newcomer->arrive(Deadline::after(300)); }), std::nullopt);
  say({{state, "refuse", "5", "no share"}});
  EXPECT_EQ(codeOf([&] { (void)joining.newcomer->arrive(soon()); }), ErrorCode::JoinRefused);
}

TEST(AgreementDriver, TooFewMembersWaitForTheStateThatANewcomerGets) {
  AgreementDriver::Config config = withAtLeast(2);
  config.quorum_wait_ms = 2000;
  const Joining joining(2, config);
  AgreementDriver& member = *joining.group.drivers[0];
  joining.group.drivers[1]->close();
  waitUntilAlone(member);
  ASSERT_EQ(member.newcomers(soon()), 1U);
  {
    const ArmedFaults slow("survive.give:1:delay=3500");
    member.give("a state");
  }
  const auto state = joining.newcomer->arrive(Deadline::after(5000)).state;
  ASSERT_TRUE(state);
  joining.newcomer->loaded();
  EXPECT_TRUE(joining.newcomer->arrive(soon()).admitted);
}

/// Until this member has met itself: the others are gone.
void waitUntilItHasMetAlone(AgreementDriver& member) {
  std::optional<AgreementDriver::Epoch> epoch;
  for (const Deadline end = soon(); !epoch || epoch->members.size() > 1;) {
    ASSERT_FALSE(end.expired());
    epoch = member.present(Deadline::after(100));
  }
}

// An evaluation may take longer than quorum_wait.
TEST(AgreementDriver, TooFewMembersGiveTheirStateAlsoIfTheirProgramComesToThatLater) {
  for (const bool gave_up_a_step : {false, true}) { // a signal handler raises in it, say
    AgreementDriver::Config config = withAtLeast(2);
    config.quorum_wait_ms = 2000;
    config.join_pause_ms = 60000;
    const Joining joining(2, config);
    AgreementDriver& member = *joining.group.drivers[0];
    (void)makeRound(joining.group, joining.group.begin().front().number);
    joining.group.drivers[1]->close();
    waitUntilItHasMetAlone(member);
    if (gave_up_a_step) {
      EXPECT_FALSE(member.begin(Deadline::after(100)));
      EXPECT_EQ(member.newcomers(soon()), 1U);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(3000));
    EXPECT_EQ(member.newcomers(soon()), 1U);
  }
}

// A step that waits for members gives no state: its newcomers wait in vain.
TEST(AgreementDriver, TooFewMembersThatGiveNoStateRaiseWhenTheirTimeIsOut) {
  for (const bool gave_before : {false, true}) {
    AgreementDriver::Config config = withAtLeast(2);
    config.quorum_wait_ms = 2000;
    config.join_pause_ms = 60000;
    const Joining joining(2, config);
    AgreementDriver& member = *joining.group.drivers[0];
    joining.group.drivers[1]->close();
    if (gave_before) {
      waitUntilAlone(member);
      EXPECT_EQ(member.newcomers(soon()), 1U);
    }
    waitUntilItHasMetAlone(member);
    EXPECT_EQ(codeOf([&] { (void)member.begin(Deadline::after(5000)); }), ErrorCode::QuorumLost);
  }
}

TEST(AgreementDriver, ANewcomerThatHasMissedThatItWasAMemberEnds) {
  const Joining joining(1, {}, 1500);
  AgreementDriver& member = *joining.group.drivers[0];
  const uint64_t last = stopForNewcomers(joining.group).number;
  EXPECT_EQ(member.newcomers(soon()), 1U);
  member.give("a state");
  const auto state = joining.newcomer->arrive(soon()).state;
  ASSERT_TRUE(state);
  {
    const ArmedFaults lost("survive.decide:1+:errno=ECONNRESET");
    joining.newcomer->loaded();
    for (const Deadline end = soon(); !end.expired();) {
      const auto epoch = member.present(Deadline::after(100));
      if (epoch && epoch->number > last + 1) {
        EXPECT_EQ(epoch->members, std::vector<int>{0});
        break;
      }
    }
  }
  EXPECT_EQ(codeOf([&] { (void)joining.newcomer->arrive(Deadline::after(10000)); }), ErrorCode::LeftBehind);
}

// The first one's state came before the second one asked, so that knows nothing of it.
TEST(AgreementDriver, NewcomersThatLoadOneAfterTheOtherAreAdmittedTogether) {
  AgreementDriver::Config config = withAtLeast(3);
  config.quorum_wait_ms = 60000;
  const Joining joining(3, config);
  AgreementDriver& member = *joining.group.drivers[0];
  joining.group.drivers[1]->close();
  joining.group.drivers[2]->close();
  const auto waitForNewcomer = [&] {
    for (const Deadline end = soon(); member.newcomers(Deadline::after(100)) != 1U;) {
      ASSERT_FALSE(end.expired());
    }
  };
  waitForNewcomer();
  member.give("a state");
  const auto state = joining.newcomer->arrive(soon()).state;
  ASSERT_TRUE(state);
  Alone other;
  const auto second = AgreementDriver::askToJoin(other.members, {joining.group.handle(0)}, joining.config);
  waitForNewcomer(); // for which the member waits from now on
  joining.newcomer->loaded();
  std::this_thread::sleep_for(std::chrono::milliseconds(500)); // its word is on the way
  waitForNewcomer();
  member.give("a state");
  const auto same = second->arrive(soon()).state;
  ASSERT_TRUE(same);
  second->loaded();
  for (const auto& newcomer : {joining.newcomer, second}) {
    const auto epoch = newcomer->arrive(soon()).admitted;
    ASSERT_TRUE(epoch);
    EXPECT_EQ(epoch->members, (std::vector<int>{0, 3, 4}));
  }
  second->close();
}

TEST(AgreementDriver, WhoIsGoneIsNoneOfTheRanksThatThereAreWithNewcomers) {
  const Joining joining(2, withAtLeast(2));
  AgreementDriver& member = *joining.group.drivers[0];
  joining.group.drivers[1]->close();
  waitUntilAlone(member);
  ASSERT_EQ(member.newcomers(soon()), 1U); // it waits for them as one rank is too few
  EXPECT_EQ(member.ranksWithNewcomers(), 2U);
}

// Too few members wait for a second newcomer, while the first one holds the state: both will be ranks.
TEST(AgreementDriver, ANewcomerThatHasLoadedIsOneOfTheRanksThatThereAreWithNewcomers) {
  const Joining joining(3, withAtLeast(3));
  AgreementDriver& member = *joining.group.drivers[0];
  Alone other;
  const auto second = AgreementDriver::askToJoin(other.members, {joining.group.handle(0)}, joining.config);
  joining.group.drivers[1]->close();
  joining.group.drivers[2]->close();
  for (const Deadline end = soon(); member.newcomers(Deadline::after(100)) != 2U;) {
    ASSERT_FALSE(end.expired());
  }
  EXPECT_EQ(member.ranksWithNewcomers(), 3U);
  member.give("a state");
  const auto state = joining.newcomer->arrive(soon()).state;
  ASSERT_TRUE(state);
  joining.newcomer->loaded();
  for (int i = 0; i < 30; ++i) { // its word is on the way
    (void)member.newcomers(Deadline::after(10));
    ASSERT_EQ(member.ranksWithNewcomers(), 3U) << i;
  }
  second->close();
}

TEST(AgreementDriver, OfTwoThatWaitOneIsRefusedAndTheOtherOneGetsTheState) {
  const Joining joining(3, withAtLeast(3));
  AgreementDriver& member = *joining.group.drivers[0];
  Alone other;
  const auto second = AgreementDriver::askToJoin(other.members, {joining.group.handle(0)}, joining.config);
  joining.group.drivers[1]->close();
  joining.group.drivers[2]->close();
  for (const Deadline end = soon(); member.newcomers(Deadline::after(100)) != 2U;) {
    ASSERT_FALSE(end.expired());
  }
  member.refuse("no share", 1);
  member.give("a state");
  size_t states = 0;
  for (const auto& newcomer : {joining.newcomer, second}) {
    const auto raised = codeOf([&] { states += newcomer->arrive(soon()).state ? 1 : 0; });
    EXPECT_TRUE(!raised || raised == ErrorCode::JoinRefused);
  }
  EXPECT_EQ(states, 1U);
  second->close();
}

TEST(AgreementDriver, ANewcomerLearnsThatItsStateWasReadTooLate) {
  AgreementDriver::Config config;
  config.join_pause_ms = 1500;
  const Joining joining(1, config);
  AgreementDriver& member = *joining.group.drivers[0];
  (void)stopForNewcomers(joining.group);
  EXPECT_EQ(member.newcomers(soon()), 1U);
  std::this_thread::sleep_for(std::chrono::milliseconds(2000)); // the members have gone on
  member.give("a state");
  const auto raised = codeOf([&] {
    for (const Deadline end = soon(); !end.expired();) {
      (void)joining.newcomer->arrive(Deadline::after(100));
    }
  });
  EXPECT_EQ(raised, ErrorCode::JoinRefused);
}

TEST(AgreementDriver, NobodyBeginsToGiveTheStateOfAnEpochThatIsOver) {
  const Joining joining(2);
  const Members& group = joining.group;
  const AgreementDriver::Epoch last = stopForNewcomers(group);
  EXPECT_EQ(group.drivers[0]->newcomers(soon()), 1U);
  const ArmedFaults stops("survive.stop_giving:1+:hold");
  breakConnection(last);
  ArmedFaults::waitUntilStruck(2); // both members
  EXPECT_FALSE(group.drivers[0]->newcomers(Deadline::after(100))); // nothing would end what it begins
}

TEST(AgreementDriver, AFormerMemberIsNoNewcomer) {
  const testing::TempFolder folder;
  const AgreementDriver::Config config = joinable(folder);
  const Members group(2, config);
  AgreementDriver& member = *group.drivers[0];
  group.drivers[1]->close();
  for (const Deadline end = soon();
       member.begin(Deadline::after(100)).value_or(AgreementDriver::Epoch()).number != 2U;) {
    ASSERT_FALSE(end.expired());
  }
  armFaultPoints("survive.link:1000000:delay=1"); // counts
  const auto links = [] { return faultPointTallies().front().visits; };
  elastic::Message join;
  join.kind = elastic::Message::Kind::Join;
  join.from = group.name(1);
  Outbox outbox(group.handle(0), group.visitor(1));
  bring(outbox, join);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(links(), 0);
  Alone stranger;
  const auto newcomer = AgreementDriver::askToJoin(stranger.members, {group.handle(0)}, config);
  for (const Deadline end = soon(); links() == 0 && !end.expired();) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_GT(links(), 0); // else the test would notice nothing
  armFaultPoints("");
  newcomer->close();
}

// Else a newcomer that was stopped would speak to members that do not listen, over connections that are as good as new.
TEST(AgreementDriver, AStrangerThatIsForgottenIsTold) {
  const testing::TempFolder folder;
  const Members group(1, joinable(folder), 1500);
  Alone stranger;
  const AbortToken none;
  const MemberHandle to = group.handle(0);
  const MemberHandle self = stranger.members.visitor().self;
  elastic::Message ping;
  ping.kind = elastic::Message::Kind::Ping;
  ping.from = {
      std::stoull(self.incarnation.substr(0, 16), nullptr, 16), std::stoull(self.incarnation.substr(16), nullptr, 16)};
  const std::string bytes = encode(ping);
  for (int times = 0; times < 2; ++times) { // it may come again
    const Dialed dialed = dial(to, stranger.members.visitor(), soon(), none);
    ASSERT_NE(dialed.link, nullptr) << dialed.why;
    const auto ask = [&](const std::vector<std::string_view>& words) {
      return askEndpoint(*dialed.link, words, soon(), none).front();
    };
    const std::string handle = self.text();
    EXPECT_EQ(ask({endpoint_request::kAgree, to.incarnation, self.incarnation, handle}), endpoint_answer::kHere);
    EXPECT_EQ(ask({endpoint_request::kSay, bytes}), endpoint_answer::kHere);
    std::this_thread::sleep_for(std::chrono::milliseconds(1800)); // for as long as a member may be silent
    (void)ask({endpoint_request::kSay, bytes});
    std::string last;
    for (const Deadline end = soon(); !end.expired() && last != endpoint_answer::kGone;) {
      last = ask({endpoint_request::kSay, bytes});
    }
    EXPECT_EQ(last, endpoint_answer::kGone);
  }
}

/// A member in a process of its own, which tells its handle through a pipe and has met by the time that it writes a second time.
TEST(AgreementDriver, ADeathOnThisHostIsCertified) {
  int to_child[2] = {-1, -1};
  int to_parent[2] = {-1, -1};
  ASSERT_EQ(::pipe(to_child), 0);
  ASSERT_EQ(::pipe(to_parent), 0);
  const auto writeText = [](int fd, const std::string& text) {
    const std::string padded = text + std::string(1024 - text.size(), ' ');
    return ::write(fd, padded.data(), padded.size()) == 1024;
  };
  const auto readText = [](int fd) {
    std::string text(1024, ' ');
    size_t got = 0;
    while (got < text.size()) {
      pollfd ready{fd, POLLIN, 0};
      if (::poll(&ready, 1, 60000) != 1) {
        return std::string();
      }
      const ssize_t n = ::read(fd, text.data() + got, text.size() - got);
      if (n <= 0) {
        return std::string();
      }
      got += static_cast<size_t>(n);
    }
    return text.substr(0, text.find(' '));
  };
  const auto join = [&](Reconfigurable& members, int rank, int out, int in, const AgreementDriver::Config& config) {
    EXPECT_TRUE(writeText(out, members.handle()));
    const std::string other = readText(in);
    const std::vector<std::string> handles = rank == 0 ? std::vector<std::string>{members.handle(), other}
                                                       : std::vector<std::string>{other, members.handle()};
    JoinAbort nobody;
    auto met = members.meet(members.plan(1, handles), soon(), nobody);
    return AgreementDriver::open(members, met, config, [&] {
      EXPECT_TRUE(writeText(out, "here"));
      (void)readText(in);
    });
  };
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Engine engine;
    Reconfigurable members(engine, groupConfig(0, 1));
    const auto driver = join(members, 0, to_parent[1], to_child[0], {});
    (void)driver->begin(soon());
    (void)writeText(to_parent[1], "begun");
    ::close(to_child[1]);
    (void)readText(to_child[0]); // until it is killed, or its parent has ended
    ::_exit(0);
  }
  ::close(std::exchange(to_parent[1], -1)); // else nothing would end if the child has ended
  Engine engine;
  Reconfigurable members(engine, groupConfig(0, 1));
  AgreementDriver::Config config;
  config.quorum_wait_ms = 3000;
  const auto driver = join(members, 1, to_child[1], to_parent[0], config);
  ASSERT_TRUE(driver->begin(soon()));
  EXPECT_EQ(readText(to_parent[0]), "begun");
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  const auto verdict = driver->verdict(1, soon()); // half of two, without the lowest
  ASSERT_TRUE(verdict && verdict->again);
  EXPECT_EQ(verdict->again->members, std::vector<int>{1});
  for (const int fd : {to_child[0], to_child[1], to_parent[0]}) {
    ::close(fd);
  }
}

} // namespace
} // namespace pycomm

// ADeathOnThisHostIsCertified forks, and other tests may have left a thread that sleeps. ThreadSanitizer would end
// a child of such a process where it starts threads.
#ifdef __SANITIZE_THREAD__
extern "C" const char* __tsan_default_options(); // NOLINT
extern "C" const char* __tsan_default_options() { // NOLINT
  return "die_after_fork=0";
}
#endif
