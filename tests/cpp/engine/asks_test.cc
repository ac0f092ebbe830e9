// Questions for messages: how many a rank asks in a while, however many receives wait.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "engine/data/data_plane.h"
#include "schedule/make_schedule.h"

namespace pycomm {
namespace {

using std::chrono::milliseconds;

/// A loop whose time is the test's.
class StillLoop final : public Loop {
 public:
  void watch(int, uint32_t, Handler&) override {}
  void unwatch(int) noexcept override {}
  void addTicker(Ticker&) override {}
  void removeTicker(Ticker&) noexcept override {}
  void addBusy(int) noexcept override {}
};

// 256 in 10 ms: else the questions of a rank with many receives would take the time of its lane, and of the rank that answers.
TEST(Asks, ManyReceivesAskAFewAtATime) {
  constexpr size_t kReceives = 2000;
  GroupIdentity identity;
  identity.rank = 0;
  identity.size = 2;
  identity.name = "test";
  identity.hash = 7;
  identity.hosts = {"alpha", "beta"};
  size_t questions = 0;
  StillLoop loop;
  DataPlane::Events events;
  std::vector<ErrorRecord> noticed;
  events.noticed = [&](ErrorRecord record) { noticed.push_back(std::move(record)); };
  events.doubted = events.noticed;
  events.left = [](int) {};
  events.ask = [&](const std::vector<Question>& asked) {
    for (const Question& question : asked) {
      EXPECT_EQ(question.to, 1);
      EXPECT_EQ(question.header.type, FrameType::Waiting);
      EXPECT_EQ(question.header.op_id, PointToPoint::kAskId);
      EXPECT_EQ(question.header.payload_nbytes, 0U);
    }
    questions += asked.size();
  };
  DataPlane::Options options;
  options.connect = [](int) -> std::unique_ptr<Link> {
    ADD_FAILURE() << "a bulk link is opened for a question";
    throw Error(ErrorCode::ConnectFailed, "no links here");
  };
  DataPlane plane(identity, loop, std::move(events), std::move(options));

  ScheduleRequest wish;
  wish.kind = Collective::Recv;
  wish.dtype = wish.wire_dtype = DType::Float32;
  wish.size = 2;
  wish.root = 1;
  const auto schedule = prepare(makeSchedule(wish));
  for (size_t tag = 0; tag < kReceives; ++tag) {
    Operation::Request request;
    request.schedule = schedule;
    request.descriptor.kind = Collective::Send; // as the sender has it
    request.descriptor.dtype = request.descriptor.wire_dtype = DType::Float32;
    request.descriptor.algorithm = Algorithm::Direct;
    request.descriptor.tag = static_cast<uint32_t>(tag);
    request.receives = true;
    request.peer = 1;
    plane.post(std::make_shared<Operation>(std::move(request)));
  }

  const auto askedAt = [&](TimePoint now) {
    const size_t before = questions;
    plane.tick(now);
    return questions - before;
  };
  const TimePoint start = Clock::now() + milliseconds(2); // all of them have waited for long enough
  EXPECT_EQ(askedAt(start), 256U);
  EXPECT_EQ(askedAt(start + milliseconds(1)), 0U) << "a pause";
  EXPECT_GT(plane.nextTick(), start + milliseconds(1)) << "which the loop may sleep through";
  EXPECT_LE(plane.nextTick(), start + milliseconds(10));
  EXPECT_EQ(askedAt(start + milliseconds(9)), 0U);
  for (int i = 1; i <= 6; ++i) {
    EXPECT_EQ(askedAt(start + milliseconds(10 * i)), 256U) << i;
  }
  EXPECT_TRUE(noticed.empty()) << noticed.front().text();
  ErrorRecord end;
  end.code = ErrorCode::ShutDown;
  plane.fail(end);
}

} // namespace
} // namespace pycomm
