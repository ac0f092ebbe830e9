// A member of the group that gives its messages names which are not theirs.
#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "engine/data/data_plane.h"
#include "fuzz/bytes_link.h"
#include "schedule/make_schedule.h"

namespace pycomm::testing {
namespace {

constexpr int kPeer = 0;
constexpr int kSelf = 1;
constexpr int kOther = 2;
constexpr int kRanks = 3;
constexpr int kFd = 1000;
constexpr uint32_t kTag = 3;
constexpr int64_t kNumel = 5;

/// A rank of three; the test is the other two.
struct AttackedRank {
  static GroupIdentity identityOf(int rank = kSelf) {
    GroupIdentity identity;
    identity.rank = rank;
    identity.size = kRanks;
    identity.name = "test";
    identity.hash = 7;
    identity.hosts = {"alpha", "beta", "gamma"};
    return identity;
  }

  AttackedRank() {
    DataPlane::Events events;
    events.noticed = [this](const ErrorRecord& record) { noticed.push_back(record); };
    events.left = [](int) {};
    events.doubted = events.noticed;
    events.ask = [](const std::vector<Question>&) {};
    DataPlane::Options options;
    options.connect = [this](int) { return std::make_unique<fuzz::BytesLink>(nullptr, 0, 1, --next_fd_); };
    plane = std::make_unique<DataPlane>(identity, loop, std::move(events), std::move(options));
  }

  std::shared_ptr<Operation> post(Operation::Request&& request) {
    auto& memory = memory_.emplace_back(std::make_unique<float[]>(kNumel));
    request.input = request.output = {reinterpret_cast<std::byte*>(memory.get()), kNumel * sizeof(float)};
    operations.push_back(std::make_shared<Operation>(std::move(request)));
    plane->post(operations.back());
    return operations.back();
  }

  static Operation::Request request(Collective kind) {
    ScheduleRequest wish;
    wish.kind = kind;
    wish.dtype = DType::Float32;
    wish.rank = kSelf;
    wish.size = kRanks;
    wish.root = kPeer;
    wish.numel = kNumel;
    Operation::Request request;
    request.schedule = prepare(makeSchedule(wish));
    request.descriptor = Descriptor::of(wish, request.schedule->schedule.algorithm);
    return request;
  }

  std::shared_ptr<Operation> receive() {
    Operation::Request wish = request(Collective::Recv);
    wish.descriptor = descriptorOf(-1);
    wish.receives = true;
    wish.peer = kPeer;
    return post(std::move(wish));
  }

  static Descriptor descriptorOf(int root) {
    Descriptor descriptor;
    descriptor.kind = Collective::Send;
    descriptor.dtype = DType::Float32;
    descriptor.algorithm = Algorithm::Direct;
    descriptor.numel = kNumel;
    descriptor.tag = kTag;
    descriptor.root = root;
    return descriptor;
  }

  /// A frame of a message from `sender`; Data brings all of it.
  std::string frame(
      FrameType type,
      PointToPoint::Name name,
      uint64_t aux,
      Collective kind = Collective::Send,
      int sender = kPeer) {
    FrameHeader header;
    descriptorOf(sender).writeTo(header);
    header.kind = static_cast<uint8_t>(kind);
    header.type = type;
    header.group = identity.hash;
    header.op_id = name.id;
    header.digest = name.index;
    header.aux = aux;
    const std::string payload(type == FrameType::Data ? kNumel * sizeof(float) : 0, '\0');
    header.payload_nbytes = static_cast<uint32_t>(payload.size());
    return std::string(reinterpret_cast<const char*>(&header), sizeof header) + payload;
  }

  /// All that ever comes from that rank.
  void arrive(const std::string& text, int from = kPeer) {
    const std::string& bytes = bytes_.emplace_back(text);
    const auto* const begin = reinterpret_cast<const uint8_t*>(bytes.data());
    const int fd = kFd + from;
    plane->adopt(from, std::make_unique<fuzz::BytesLink>(begin, bytes.size(), bytes.size(), fd));
    while (loop.ready(fd, EPOLLIN)) {
    }
  }

  /// What the group fails with. All operations have ended afterwards.
  ErrorRecord end() {
    ErrorRecord cause;
    cause.code = ErrorCode::Aborted;
    plane->fail(noticed.empty() ? cause : noticed.front());
    for (const auto& operation : operations) {
      EXPECT_TRUE(operation->done()) << operation->label();
    }
    return noticed.empty() ? cause : noticed.front();
  }

  void expectNameRefused(int peer) {
    EXPECT_FALSE(noticed.empty());
    const ErrorRecord error = end();
    EXPECT_EQ(error.code, ErrorCode::ProtocolViolation);
    EXPECT_EQ(error.peer, peer);
    EXPECT_NE(error.summary.find("a message that has the name of another operation"), std::string::npos)
        << error.summary;
  }

  const GroupIdentity identity = identityOf();
  fuzz::HandLoop loop;
  std::vector<ErrorRecord> noticed;
  std::unique_ptr<DataPlane> plane;
  std::vector<std::shared_ptr<Operation>> operations;
  const GroupIdentity peer_identity = identityOf(kPeer);
  Tables peer_tables{peer_identity, Limits()};
  PointToPoint peers_names{peer_tables};

 private:
  std::vector<std::unique_ptr<float[]>> memory_;
  std::deque<std::string> bytes_;
  int next_fd_ = -1;
};

struct HostileMessages : ::testing::Test, AttackedRank {};

TEST_F(HostileMessages, OneIsReceivedUnderItsOwnName) {
  const auto received = receive();
  arrive(frame(FrameType::Data, peers_names.nameSend(kSelf), kEagerFlag));
  EXPECT_TRUE(received->done());
  EXPECT_FALSE(received->error());
}

TEST_F(HostileMessages, TheNameOfACollectiveIsRefused) {
  arrive(frame(FrameType::Waiting, {1, 0}, 0));
  receive(); // would run under the collective's name
  Operation::Request broadcast = request(Collective::Broadcast);
  broadcast.id = {1, 1};
  post(std::move(broadcast));
  expectNameRefused(kPeer);
}

// It would hold up the message of the rank whose name that is.
TEST_F(HostileMessages, TheNameOfAnotherRanksMessageIsRefused) {
  const PointToPoint::Name name = peers_names.nameSend(kSelf);
  for (const FrameType type : {FrameType::Waiting, FrameType::Data, FrameType::Credit}) {
    AttackedRank group;
    group.arrive(frame(type, name, 0), kOther);
    group.expectNameRefused(kOther);
  }
}

// Of a message from this rank, which it has not sent.
TEST_F(HostileMessages, AnAnswerToAMessageThatHasNoSuchNameIsRefused) {
  for (const FrameType type : {FrameType::Waiting, FrameType::Credit}) {
    AttackedRank group;
    Tables tables(group.identity, Limits());
    PointToPoint::Name name = PointToPoint(tables).nameSend(kPeer);
    name.id += 2; // keeps the bit of messages to oneself
    group.arrive(frame(type, name, 1, Collective::Send, kSelf));
    group.expectNameRefused(kPeer);
  }
}

// In a collective's frame: the message comes all the same, and whose frame did not fit is named.
TEST_F(HostileMessages, ACollectiveThatHasTheNameOfAMessageDoesNotHoldItUp) {
  const PointToPoint::Name name = peers_names.nameSend(kSelf);
  // A broadcast that is issued in a callback may have that id.
  arrive(frame(FrameType::Waiting, name, 0, Collective::Broadcast), kOther);
  receive();
  arrive(frame(FrameType::Data, name, kEagerFlag));
  const auto mismatch = std::find_if(noticed.begin(), noticed.end(), [](const ErrorRecord& each) {
    return each.code == ErrorCode::CollectiveMismatch; // the others say that the links have ended
  });
  ASSERT_NE(mismatch, noticed.end()) << "it waits for what is here";
  EXPECT_EQ(mismatch->peer, kOther) << mismatch->text();
  end();
}

TEST_F(HostileMessages, AnAnswerAnnouncesNothing) {
  const PointToPoint::Name name = peers_names.nameSend(kSelf);
  arrive(frame(FrameType::Waiting, name, 1) + frame(FrameType::Waiting, name, 1));
  const auto first = receive();
  const auto second = receive(); // would run under the name of the first
  EXPECT_FALSE(first->identified());
  EXPECT_FALSE(second->identified());
  end();
}

// The lowest bit alone says that it answers.
TEST_F(HostileMessages, OneIsAnnouncedWhateverIssuedIt) {
  arrive(frame(FrameType::Waiting, peers_names.nameSend(kSelf), 2));
  EXPECT_TRUE(receive()->identified());
  end();
}

TEST_F(HostileMessages, OneThatIsAnnouncedTwiceIsOne) {
  const PointToPoint::Name name = peers_names.nameSend(kSelf);
  arrive(frame(FrameType::Waiting, name, 0) + frame(FrameType::Waiting, name, 0));
  const auto first = receive();
  const auto second = receive();
  EXPECT_TRUE(first->identified());
  EXPECT_FALSE(second->identified());
  end();
}

TEST_F(HostileMessages, OneThatHasEndedIsNotAnnouncedAgain) {
  const PointToPoint::Name name = peers_names.nameSend(kSelf);
  const auto first = receive();
  const std::string again = frame(FrameType::Waiting, name, 0);
  arrive(frame(FrameType::Data, name, kEagerFlag) + again + again);
  EXPECT_TRUE(first->done());
  const auto second = receive();
  EXPECT_FALSE(second->identified());
  end();
}

} // namespace
} // namespace pycomm::testing
