// The order in which the planes of a group close: what is still there in each step.
#include "engine/closing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <string>

#include "allocations.h"
#include "engine/loop/event_loop.h"

namespace pycomm::testing {
namespace {

using ::testing::ElementsAre;

GroupIdentity identity() {
  GroupIdentity identity;
  identity.size = 2;
  identity.name = "test";
  identity.hosts = {"alpha", "alpha"};
  return identity;
}

/// The planes of rank 0 of two, on loops of their own. Nobody connects.
class Closed : public ::testing::Test {
 protected:
  Closed() : data_loop_("data loop"), control_("control"), planes_(identity_, data_loop_, control_, events()) {}
  ~Closed() override {
    data_loop_.run([this] { planes_.dropData(); });
    control_.run([this] { planes_.dropControl(); });
    data_loop_.stop();
    control_.stop();
  }

  static Planes::Events events() {
    Planes::Events events;
    events.failed = [](const ErrorRecord&) {};
    return events;
  }
  void open() {
    Membership::Config membership;
    membership.hosts = identity_.hosts;
    data_loop_.run([this] { planes_.openData(); });
    control_.run([&] { planes_.openControl({}, membership); });
  }
  void openHost() {
    auto arena = std::make_shared<SharedArena>(SharedArena::create(HostView::totalNbytes(2)));
    arena->commit(0, HostView::commonNbytes(2));
    control_.run([&] { planes_.openHost(arena, HostHeaps(), HostPlane::Config()); });
  }
  /// A receive from any rank. It waits for ever, because no rank sends.
  std::shared_ptr<Operation> receive() {
    Operation::Request request;
    request.descriptor.kind = Collective::Send;
    request.receives = true;
    request.peer = PointToPoint::kAnyRank;
    auto operation = std::make_shared<Operation>(std::move(request));
    data_loop_.run([&] { planes_.run(&DataPlane::post, operation); });
    return operation;
  }
  static ErrorRecord reason() {
    ErrorRecord reason;
    reason.code = ErrorCode::ShutDown;
    reason.summary = "The test closes it.";
    return reason;
  }
  void make(bool failed = false) {
    closing_.emplace(planes_, failed, reason(), [this] { note("leave control"); });
  }
  void close(bool failed = false) {
    make(failed);
    for (const Closing::Step& step : closing_->steps()) {
      run(step);
    }
    note("closed");
  }
  /// Runs the step to its end.
  void run(const Closing::Step& step) {
    const auto run_it = [&] { step.run([] {}); };
    switch (step.on) {
      case Closing::Step::On::Caller:
        run_it();
        break;
      case Closing::Step::On::DataLoop:
        note("data loop");
        data_loop_.run(run_it);
        break;
      case Closing::Step::On::DataLoopUntilOver: {
        note("data loop until");
        std::promise<void> over;
        data_loop_.post([&] { step.run([&] { over.set_value(); }); });
        EXPECT_EQ(over.get_future().wait_for(std::chrono::seconds(10)), std::future_status::ready);
        break;
      }
      case Closing::Step::On::Control:
        note("control");
        control_.run(run_it);
        break;
      case Closing::Step::On::ControlLinks:
        note("close gently");
        EXPECT_TRUE(closing_->control_links.empty()); // nobody has connected
        break;
    }
  }
  /// The step, and which planes are there as it begins.
  void note(const std::string& step) {
    steps_.push_back(
        step + ":" + (planes_.host() == nullptr ? "" : " host") + (planes_.data() == nullptr ? "" : " data") +
        (planes_.control() == nullptr ? "" : " control"));
  }

  const GroupIdentity identity_ = identity();
  EventLoop data_loop_;
  EventLoop control_;
  Planes planes_;
  std::optional<Closing> closing_;
  std::vector<std::string> steps_;
};

TEST_F(Closed, BulkLinksGoLast) {
  open();
  close();
  EXPECT_THAT(
      steps_,
      ElementsAre(
          "data loop until: data control",
          "control: data control",
          "leave control: data control",
          "close gently: data",
          "data loop: data",
          "closed:"));
}

TEST_F(Closed, OperationsEndBeforeControlLinksSayGoodbye) {
  open();
  const auto operation = receive();
  ASSERT_FALSE(operation->done());
  make();
  for (const Closing::Step& step : closing_->steps()) {
    if (step.on == Closing::Step::On::Control) {
      break;
    }
    run(step);
  }
  ASSERT_TRUE(operation->done());
  EXPECT_EQ(operation->error()->code, ErrorCode::ShutDown);
  EXPECT_EQ(operation->error()->summary, "The test closes it.");
  EXPECT_THAT(steps_, ElementsAre("data loop until: data control"));
}

// A group that is destroyed without memory must close nevertheless.
TEST_F(Closed, TakesNoMemory) {
  open();
  openHost();
  ErrorRecord why = reason();
  Closing::Body leave = [] {};
  failAllocation(1);
  Closing closing(planes_, true, std::move(why), std::move(leave));
  const bool struck = allocationFailed();
  failAllocation(0);
  EXPECT_FALSE(struck);
  EXPECT_EQ(closing.steps().size(), 8U);
}

TEST_F(Closed, WhatWasNeverOpenedIsLeftOut) {
  close();
  EXPECT_THAT(steps_, ElementsAre("data loop:", "closed:"));
}

TEST_F(Closed, TheHostPlaneEndsFirst) {
  open();
  openHost();
  close();
  std::shared_ptr<Operation> late;
  const auto make = [] { return std::make_shared<Operation>(Operation::Request()); };
  EXPECT_FALSE(planes_.host()->post(make, true, late));
  EXPECT_EQ(steps_.front(), "data loop until: host data control");
}

TEST_F(Closed, TheHostPlaneLearnsOfAFailureBeforeItCloses) {
  open();
  openHost();
  close(true);
  ASSERT_GE(steps_.size(), 2U);
  EXPECT_EQ(steps_[0], "control: host data control");
  EXPECT_EQ(steps_[1], "data loop until: host data control");
}

} // namespace
} // namespace pycomm::testing
