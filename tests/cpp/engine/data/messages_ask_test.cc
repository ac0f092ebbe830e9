// Questions for messages: how many a rank asks in a while, however many receives wait.
#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "engine/data/data_plane.h"
#include "schedule/make_schedule.h"

namespace pycomm {
namespace {

using std::chrono::milliseconds;

/// Takes everything, and keeps it.
class KeepingLink final : public Link {
 public:
  explicit KeepingLink(std::string& written) : written_(written) {}
  [[nodiscard]] int fd() const noexcept override {
    return 1000;
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override {
    Progress progress;
    for (size_t i = 0; i < count; ++i) {
      written_.append(reinterpret_cast<const char*>(views[i].ptr), views[i].nbytes);
      progress.nbytes += views[i].nbytes;
    }
    return progress;
  }
  [[nodiscard]] Progress tryRead(BufferView) override {
    Progress progress;
    progress.would_block = true;
    return progress;
  }
  void shutdownWrite() noexcept override {}
  [[nodiscard]] std::string describe() const override {
    return "a link that keeps what is written";
  }

 private:
  std::string& written_; ///< outlives the plane, which owns this
};

/// A loop whose links are ready when the test says so, and whose time is the test's.
class StillLoop final : public Loop {
 public:
  void watch(int, uint32_t, Handler& handler) override {
    handler_ = &handler;
  }
  void unwatch(int) noexcept override {
    handler_ = nullptr;
  }
  void addTicker(Ticker&) override {}
  void removeTicker(Ticker&) noexcept override {}
  void addBusy(int) noexcept override {}
  void writable() {
    if (handler_ != nullptr) {
      handler_->onReady(EPOLLOUT);
    }
  }

 private:
  Handler* handler_ = nullptr; ///< of the one link, alive until unwatch
};

/// The data plane of rank 0 of 2, whose peer never answers.
struct LoneRank {
  std::string written; ///< to the peer
  StillLoop loop;
  std::vector<ErrorRecord> noticed;
  DataPlane plane{identity(), loop, events(), options()};

 private:
  static GroupIdentity identity() {
    GroupIdentity identity;
    identity.rank = 0;
    identity.size = 2;
    identity.name = "test";
    identity.hash = 7;
    identity.hosts = {"alpha", "beta"};
    return identity;
  }
  DataPlane::Events events() {
    DataPlane::Events events;
    events.noticed = [this](ErrorRecord record) { noticed.push_back(std::move(record)); };
    events.doubted = events.noticed;
    events.left = [](int) {};
    return events;
  }
  DataPlane::Options options() {
    DataPlane::Options options;
    options.connect = [this](int) { return std::make_unique<KeepingLink>(written); };
    return options;
  }
};

size_t questionsIn(const std::string& written) {
  size_t count = 0;
  for (size_t at = kHelloNbytes; at + sizeof(FrameHeader) <= written.size(); at += sizeof(FrameHeader)) {
    FrameHeader header;
    std::memcpy(static_cast<void*>(&header), written.data() + at, sizeof header);
    EXPECT_EQ(header.magic, FrameHeader::kMagic);
    EXPECT_EQ(header.payload_nbytes, 0U);
    count += header.type == FrameType::Waiting && header.op_id == PointToPoint::kAskId ? 1 : 0;
  }
  return count;
}

// Its first report may be lost for want of memory on its way to the control plane.
TEST(Asks, AReceiveThatIsOverdueIsReportedEachSecond) {
  LoneRank rank;
  auto& [written, loop, noticed, plane] = rank;
  const TimePoint deadline = Clock::now() + std::chrono::seconds(60);
  Operation::Request request;
  request.descriptor.kind = Collective::Send;
  request.receives = true;
  request.peer = PointToPoint::kAnyRank;
  request.deadline = Deadline::at(deadline);
  plane.post(std::make_shared<Operation>(std::move(request)));
  for (size_t times = 1; times <= 3; ++times) {
    const TimePoint due = deadline + std::chrono::seconds(times - 1);
    plane.tick(due - milliseconds(1));
    EXPECT_EQ(noticed.size(), times - 1);
    plane.tick(due);
    ASSERT_EQ(noticed.size(), times);
    EXPECT_EQ(noticed.back().code, ErrorCode::Timeout) << noticed.back().text();
  }
  ErrorRecord end;
  end.code = ErrorCode::ShutDown;
  plane.fail(end);
}

// 256 in 10 ms: else the questions of a rank with many receives would take the time of its data loop, and of the rank that answers.
TEST(Asks, ManyReceivesAskAFewAtATime) {
  constexpr size_t kReceives = 2000;
  LoneRank rank;
  auto& [written, loop, noticed, plane] = rank;

  ScheduleRequest wish;
  wish.kind = Collective::Recv;
  wish.dtype = DType::Float32;
  wish.size = 2;
  wish.root = 1;
  const auto schedule = prepare(makeSchedule(wish));
  for (size_t tag = 0; tag < kReceives; ++tag) {
    Operation::Request request;
    request.schedule = schedule;
    request.descriptor.kind = Collective::Send; // as the sender has it
    request.descriptor.dtype = DType::Float32;
    request.descriptor.algorithm = Algorithm::Direct;
    request.descriptor.tag = static_cast<uint32_t>(tag);
    request.receives = true;
    request.peer = 1;
    plane.post(std::make_shared<Operation>(std::move(request)));
  }

  const auto askedAt = [&](TimePoint now) {
    const size_t before = questionsIn(written);
    plane.tick(now);
    loop.writable();
    return questionsIn(written) - before;
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
