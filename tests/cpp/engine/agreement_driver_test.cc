#include "engine/survive/agreement_driver.h"

#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/meeting/instance.h"
#include "ranks.h"

namespace pycomm {
namespace {

using testing::groupConfig;

/// A process that has met itself, in epoch 1.
struct Alone {
  Alone() : members(engine, groupConfig(0, 1)) {
    JoinAbort nobody;
    met = members.meet(members.plan(1, {members.handle()}), Deadline::after(10000), nobody);
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
        (void)AgreementDriver::open(
            alone.members, alone.met, {}, [&] { (void)alone.engine.shutdown(Deadline::after(5000)); });
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
  EXPECT_TRUE(driver->begin(Deadline::after(5000))); // the first has lost nothing
}

TEST(AgreementDriver, DeliversEachStepBeforeTheNextBegins) {
  Alone alone;
  const auto driver = AgreementDriver::open(alone.members, alone.met, {}, [] {});
  const Deadline soon = Deadline::after(5000);
  ASSERT_TRUE(driver->begin(soon));
  ASSERT_TRUE(driver->begin(soon)); // one that this rank has not finished counts nowhere
  ASSERT_TRUE(driver->finished(1));
  EXPECT_EQ(codeOf([&] { (void)driver->begin(soon); }), ErrorCode::Aborted);
  EXPECT_EQ(codeOf([&] { (void)driver->finished(1); }), ErrorCode::Aborted);
  EXPECT_TRUE(driver->committed(1));
  EXPECT_TRUE(driver->begin(soon));
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
    const Reconfigurable::Met met = one.members->meet(one.members->plan(1, handles), Deadline::after(10000), nobody);
    AgreementDriver::Config config;
    config.min_ranks = 2;
    one.driver = AgreementDriver::open(*one.members, met, config, [&] { together.arrive_and_wait(); });
  });
  all[0].driver->close();
  onEach(1, [&](Member& one) {
    std::optional<AgreementDriver::Epoch> epoch;
    for (const Deadline soon = Deadline::after(10000); !soon.expired() && (!epoch || epoch->number == 1);) {
      epoch = one.driver->begin(Deadline::after(100));
    }
    ASSERT_TRUE(epoch);
    EXPECT_EQ(epoch->met.group->identity().job.numbers(), (std::vector<int>{5, 7}));
  });
  all[1].driver->close();
  std::optional<ErrorRecord> error;
  for (const Deadline soon = Deadline::after(10000); !soon.expired() && !error;) {
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

} // namespace
} // namespace pycomm
