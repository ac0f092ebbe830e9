// Operations as they are issued, before anything runs. What becomes of them is shown with whole groups (group_*_test.cc).
#include "engine/issuer.h"

#include <gtest/gtest.h>

#include <vector>

#include "engine/data/point_to_point.h"
#include "engine/operation/issue_context.h"
#include "engine/rosters.h"

namespace pycomm::testing {
namespace {

class Issued : public ::testing::Test {
 protected:
  Issued() {
    FlightLog::Subject subject;
    subject.rank = 0;
    subject.size = 2;
    subject.slots = 8;
    issuer_ = std::make_unique<Issuer>(roster_, FlightLog::open(std::move(subject)));
  }
  Call call(Collective kind = Collective::AllReduce) {
    Call call;
    call.schedule.kind = kind;
    call.schedule.dtype = DType::Float32;
    call.schedule.reduce_op = kind == Collective::AllReduce ? ReduceOp::Sum : ReduceOp::None;
    call.schedule.numel = static_cast<int64_t>(values_.size());
    const auto nbytes = values_.size() * sizeof(float);
    call.input = {reinterpret_cast<const std::byte*>(values_.data()), nbytes};
    call.output = {reinterpret_cast<std::byte*>(values_.data()), nbytes};
    return call;
  }

  const Roster roster_ = rosterOf(0, {"alpha", "alpha"});
  std::vector<float> values_ = std::vector<float>(1 << 20); // more than one piece
  std::unique_ptr<Issuer> issuer_;
};

TEST_F(Issued, CollectivesOfAllKindsShareOneCounter) {
  EXPECT_EQ(issuer_->overLinks(call())->request().id.id, 1U);
  EXPECT_EQ(issuer_->onHost(issuer_->requestOnHost(call()), false)->request().id.id, 2U);
  EXPECT_EQ(issuer_->followed(call())->request().id.id, 3U);
  EXPECT_EQ(issuer_->issued(), 3);
}

TEST_F(Issued, AnOperationInACallbackTakesNoNumber) {
  const IssueScope scope(continuationOf({1, 1}, roster_.identity.hash, 1));
  EXPECT_NE(issuer_->overLinks(call())->request().id.id & kDerivedIdBit, 0U);
  EXPECT_EQ(issuer_->issued(), 0);
}

// Not all ranks take part in a message.
TEST_F(Issued, AMessageTakesNoNumber) {
  Call send = call(Collective::Send);
  send.peer = 1;
  const auto sent = issuer_->overLinks(send);
  EXPECT_FALSE(sent->request().receives);
  EXPECT_EQ(sent->request().peer, 1);
  EXPECT_NE(sent->request().schedule, nullptr);
  Call receive = call(Collective::Recv);
  receive.peer = PointToPoint::kAnyRank;
  const auto received = issuer_->overLinks(receive);
  EXPECT_TRUE(received->request().receives);
  EXPECT_EQ(received->request().descriptor.kind, Collective::Send); // what both sides compare
  EXPECT_EQ(received->request().schedule, nullptr); // until the sender is known
  EXPECT_EQ(issuer_->issued(), 0);
}

TEST_F(Issued, ACallWithoutMeaningTakesNoNumber) {
  Call wrong = call();
  wrong.schedule.numel = -1;
  EXPECT_THROW(static_cast<void>(issuer_->overLinks(wrong)), Error);
  EXPECT_THROW(static_cast<void>(issuer_->requestOnHost(wrong)), Error);
  EXPECT_THROW(static_cast<void>(issuer_->followed(wrong)), Error);
  EXPECT_EQ(issuer_->issued(), 0);
}

TEST_F(Issued, TheAlgorithmSaysWhereItRuns) {
  EXPECT_EQ(
      issuer_->onHost(issuer_->requestOnHost(call()), true)->request().descriptor.algorithm, Algorithm::SharedMemory);
  EXPECT_EQ(issuer_->followed(call())->request().descriptor.algorithm, Algorithm::Nccl);
  const auto over_links = issuer_->overLinks(call());
  EXPECT_EQ(over_links->request().descriptor.algorithm, over_links->request().schedule->schedule.algorithm);
}

TEST_F(Issued, OnlyAHeldCallComesInPieces) {
  Call pieces = call();
  pieces.in_pieces = true;
  EXPECT_EQ(issuer_->overLinks(pieces)->request().extras().pieces, nullptr);
  pieces.held = true;
  EXPECT_NE(issuer_->overLinks(pieces)->request().extras().pieces, nullptr);
  const auto on_host = issuer_->onHost(issuer_->requestOnHost(pieces), true);
  EXPECT_NE(on_host->request().extras().pieces, nullptr);
  EXPECT_TRUE(on_host->shared().held.load());
}

} // namespace
} // namespace pycomm::testing
