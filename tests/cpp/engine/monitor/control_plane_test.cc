// What a control link may bring. A broken or foreign peer is the culprit, and nothing that it wrote is used as it came.
#include "engine/monitor/control_plane.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstring>
#include <future>
#include <string>

#include "engine/loop/event_loop.h"
#include "transport/net/tcp_link.h"

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
  Plane() : loop_("test") {
    Membership::Config membership;
    membership.rank = 1;
    membership.hosts = identity().hosts;
    membership.neighbours = {0, 2, 3};
    ControlPlane::Events events;
    events.failed = [this](const ErrorRecord& record) { failed_.set_value(record); };
    events.bulk_link = [this](const Hello&, std::unique_ptr<Link>) { ++bulk_links; };
    events.left = [](int) {};
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    peer = std::make_unique<TcpLink>(UniqueFd(ends[0]));
    auto link = std::make_unique<TcpLink>(UniqueFd(ends[1]));
    loop_.run([&] {
      plane_ =
          std::make_unique<ControlPlane>(identity(), loop_, std::vector<Listener>(), membership, std::move(events));
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
    auto future = failed_.get_future();
    ErrorRecord none;
    none.code = ErrorCode::Ok;
    return future.wait_for(std::chrono::milliseconds(timeout_ms)) == std::future_status::ready ? future.get() : none;
  }
  void welcome(int rank, LinkPurpose purpose) {
    Accepted accepted;
    accepted.hello = identity().hello(purpose);
    accepted.hello.rank = rank;
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    const UniqueFd other(ends[0]);
    accepted.link = std::make_unique<TcpLink>(UniqueFd(ends[1]));
    loop_.run([&] { plane_->welcome(std::move(accepted)); });
  }
  std::vector<int> missing() {
    const AbortToken none;
    return plane_->waitForNeighbours(Deadline::after(0), none);
  }

  std::unique_ptr<TcpLink> peer;
  int bulk_links = 0;

 private:
  EventLoop loop_;
  std::unique_ptr<ControlPlane> plane_;
  std::promise<ErrorRecord> failed_;
};

FrameHeader header(FrameType type) {
  FrameHeader header;
  header.type = type;
  header.group = kPlaneGroup;
  return header;
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
  struct Case {
    FrameHeader header;
    const char* says;
  };
  const std::vector<Case> cases = {
      {other_group, "another group or epoch"},
      {other_epoch, "another group or epoch"},
      {large, "a payload of"},
      {loaded, "a payload of 1 bytes"},
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

} // namespace
} // namespace pycomm::testing
