#include "engine/survive/agreement_driver.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
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

} // namespace
} // namespace pycomm
