#include "engine/links/peer_links.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <map>
#include <string>

#include "engine/loop/staging_pool.h"

namespace pycomm {
namespace {

/// What the test decides about a link to one peer, and sees of it.
struct Wire {
  bool connected = false;
  bool broken = false; ///< the next try fails
  bool broken_for_writers = false; ///< the next tryWrite() fails
  size_t room = 1 << 20; ///< bytes that may be written
  std::string written;
  std::string arriving;
  bool closed = false; ///< by the peer, after what is arriving
  bool shut_down = false;
};

class WireLink final : public Link {
 public:
  WireLink(Wire& wire, int fd) : wire_(wire), fd_(fd) {}
  [[nodiscard]] int fd() const noexcept override {
    return fd_;
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override {
    failIfBroken();
    if (wire_.broken_for_writers) {
      throw Error(ErrorCode::ConnectionReset, "nobody reads it");
    }
    Progress progress;
    for (size_t i = 0; i < count && wire_.room > 0; ++i) {
      const size_t nbytes = std::min(wire_.room, views[i].nbytes);
      wire_.written.append(reinterpret_cast<const char*>(views[i].ptr), nbytes);
      wire_.room -= nbytes;
      progress.nbytes += nbytes;
    }
    progress.would_block = wire_.room == 0;
    return progress;
  }
  [[nodiscard]] Progress tryRead(BufferView into) override {
    failIfBroken();
    Progress progress;
    progress.nbytes = std::min(into.nbytes, wire_.arriving.size());
    wire_.arriving.copy(reinterpret_cast<char*>(into.ptr), progress.nbytes);
    wire_.arriving.erase(0, progress.nbytes);
    progress.closed = progress.nbytes == 0 && wire_.closed;
    progress.would_block = progress.nbytes == 0 && !wire_.closed;
    return progress;
  }
  void shutdownWrite() noexcept override {
    wire_.shut_down = true;
  }
  [[nodiscard]] bool finishConnect() override {
    failIfBroken();
    return wire_.connected;
  }
  [[nodiscard]] std::string describe() const override {
    return "a link of the test's";
  }

 private:
  void failIfBroken() const {
    if (wire_.broken) {
      throw Error(ErrorCode::ConnectionReset, "it broke");
    }
  }
  Wire& wire_; ///< outlives the links
  const int fd_;
};

/// Descriptors are ready when the test says so.
class CalledLoop final : public Loop {
 public:
  void watch(int fd, uint32_t events, Handler& handler) override {
    watches_[fd] = {events, &handler};
  }
  void unwatch(int fd) noexcept override {
    watches_.erase(fd);
  }
  void addTicker(Ticker&) override {}
  void removeTicker(Ticker&) noexcept override {}
  void addBusy(int) noexcept override {}

  [[nodiscard]] bool watches(int fd, uint32_t events) const {
    const auto found = watches_.find(fd);
    return found != watches_.end() && (found->second.first & events) == events;
  }
  [[nodiscard]] size_t watched() const noexcept {
    return watches_.size();
  }
  void ready(int fd, uint32_t events) {
    watches_.at(fd).second->onReady(events);
  }

 private:
  std::map<int, std::pair<uint32_t, Handler*>> watches_; ///< handlers live until unwatch
};

class PeerLinksTest : public ::testing::Test, protected LinkOwner {
 protected:
  static constexpr int kOut = 1000; ///< descriptors of links that rank 0 opens, by peer
  static constexpr int kIn = 2000;

  PeerLinksTest() : staging(loop.stagingMemory()) {
    identity.rank = 0;
    identity.size = 3;
    identity.name = "test";
    identity.hash = 7;
    identity.hosts = {"alpha", "beta", "gamma"};
    options.connect = [this](int peer) { return std::make_unique<WireLink>(out[peer], kOut + peer); };
    LinkOwner& self = *this;
    links = std::make_unique<PeerLinks>(identity, options, loop, staging, self);
  }

  void send(int peer, int64_t step) {
    OutFrame frame;
    frame.header.op_id = static_cast<uint64_t>(step);
    frame.step = step;
    links->send(peer, std::move(frame));
    while (links->flush()) {
    }
  }
  void connect(int peer) {
    out[peer].connected = true;
    loop.ready(kOut + peer, EPOLLOUT);
  }
  void adopt(int peer) {
    links->adopt(peer, std::make_unique<WireLink>(in[peer], kIn + peer));
  }
  static std::string frame(FrameType type) {
    FrameHeader header;
    header.type = type;
    return {reinterpret_cast<const char*>(&header), sizeof header};
  }
  /// Types of the frames that have left for a peer, behind the Hello.
  [[nodiscard]] std::vector<FrameType> left(int peer) {
    std::vector<FrameType> types;
    for (size_t at = kHelloNbytes; at + sizeof(FrameHeader) <= out[peer].written.size(); at += sizeof(FrameHeader)) {
      types.push_back(static_cast<FrameType>(out[peer].written[at + offsetof(FrameHeader, type)]));
    }
    return types;
  }

  // LinkOwner
  Sink onHeader(int, const FrameHeader&) override {
    return {};
  }
  void onFrame(int peer, const FrameHeader& header, Sink) override {
    if (header.type == FrameType::Goodbye) {
      links->endReading(peer);
    }
    frames.push_back(header.type);
  }
  void onSent(const std::vector<OutFrame>& some) override {
    for (const OutFrame& each : some) {
      sent.push_back(each.step);
    }
  }
  void onReadingEnded(int peer, const Error&) override {
    reading_ended.push_back(peer);
  }
  void onWritingBroke(int peer, const Error&) override {
    writing_broke.push_back(peer);
  }
  void onGoodbyesSaid() override {
    ++goodbyes_said;
  }
  void onThrown(int peer, const std::exception_ptr&) noexcept override {
    thrown.push_back(peer);
  }
  void run(int peer, void (*body)(const void* context), const void* context) noexcept override {
    try {
      body(context);
    } catch (...) {
      onThrown(peer, std::current_exception());
    }
  }

  std::map<int, Wire> out; ///< by peer
  std::map<int, Wire> in;
  GroupIdentity identity;
  PeerLinks::Options options;
  CalledLoop loop;
  StagingPool staging;
  std::vector<FrameType> frames; ///< that arrived
  std::vector<int64_t> sent; ///< steps
  std::vector<int> reading_ended;
  std::vector<int> writing_broke;
  std::vector<int> thrown;
  int goodbyes_said = 0;
  std::unique_ptr<PeerLinks> links;
};

TEST_F(PeerLinksTest, TheFirstFrameOpensALinkAndLeavesWhenThatIsConnected) {
  EXPECT_EQ(loop.watched(), 0U);
  send(1, 4);
  EXPECT_TRUE(loop.watches(kOut + 1, EPOLLOUT));
  loop.ready(kOut + 1, EPOLLOUT);
  EXPECT_EQ(out[1].written, "") << "it is not connected yet";
  connect(1);
  EXPECT_EQ(left(1).size(), 1U);
  EXPECT_EQ(sent, (std::vector<int64_t>{-1, 4})) << "the Hello, which nobody waits for, and the frame";
  EXPECT_FALSE(loop.watches(kOut + 1, EPOLLOUT)) << "there is room";
  send(1, 5);
  EXPECT_EQ(sent.back(), 5) << "at once";
}

TEST_F(PeerLinksTest, FramesWaitForRoom) {
  send(1, 1);
  connect(1);
  out[1].room = 10;
  send(1, 2);
  EXPECT_EQ(sent.back(), 1);
  EXPECT_TRUE(loop.watches(kOut + 1, EPOLLOUT));
  out[1].room = 1000;
  send(1, 3); // waits for its turn, and for the loop
  EXPECT_EQ(sent.back(), 1);
  loop.ready(kOut + 1, EPOLLOUT);
  EXPECT_EQ(sent.back(), 3);
  EXPECT_EQ(left(1).size(), 3U);
}

TEST_F(PeerLinksTest, ALinkThatBreaksIsReportedOnceAndTakesNothingMore) {
  send(1, 1);
  connect(1);
  out[1].broken = true;
  send(1, 2);
  EXPECT_EQ(writing_broke, std::vector<int>{1});
  EXPECT_EQ(loop.watched(), 0U);
  out[1].broken = false;
  send(1, 3);
  EXPECT_EQ(sent.back(), 1);
  EXPECT_EQ(writing_broke.size(), 1U);
  EXPECT_EQ(loop.watched(), 0U) << "no second link";
}

TEST_F(PeerLinksTest, AResetIsNoticedAlsoIfNothingIsToBeWritten) {
  send(2, 1);
  connect(2);
  loop.ready(kOut + 2, EPOLLHUP);
  EXPECT_EQ(writing_broke, std::vector<int>{2});
}

// At a Unix socket the loop sees EPOLLHUP when the peer leaves. Its goodbye may be read much later, on its control link.
TEST_F(PeerLinksTest, AHangUpOfAPeerThatHasReadEverythingBreaksTheLinkAtTheNextWrite) {
  send(1, 1);
  connect(1);
  out[1].closed = true;
  loop.ready(kOut + 1, EPOLLHUP);
  EXPECT_TRUE(writing_broke.empty()) << "its goodbye is on the way";
  EXPECT_EQ(loop.watched(), 0U) << "the hang-up would wake the loop for ever";
  out[1].broken = true;
  send(1, 2);
  EXPECT_EQ(writing_broke, std::vector<int>{1});
  EXPECT_EQ(loop.watched(), 0U);
}

TEST_F(PeerLinksTest, AHangUpWhileFramesWaitForRoomBreaksTheLinkAtOnce) {
  send(1, 1);
  connect(1);
  out[1].room = 10;
  send(1, 2);
  out[1].closed = true;
  out[1].broken_for_writers = true;
  loop.ready(kOut + 1, EPOLLHUP);
  EXPECT_EQ(writing_broke, std::vector<int>{1});
}

TEST_F(PeerLinksTest, TheEndOfAnIncomingLinkIsReportedUnlessReadingEndedBefore) {
  EXPECT_FALSE(links->isOpened(1));
  for (const int peer : {1, 2}) {
    adopt(peer);
    EXPECT_TRUE(links->isOpened(peer));
    EXPECT_FALSE(links->hasEnded(peer));
  }
  in[1].arriving = frame(FrameType::Data);
  in[1].closed = true;
  loop.ready(kIn + 1, EPOLLIN);
  loop.ready(kIn + 1, EPOLLIN);
  EXPECT_EQ(frames, std::vector<FrameType>{FrameType::Data});
  EXPECT_EQ(reading_ended, std::vector<int>{1});
  in[2].arriving = frame(FrameType::Goodbye);
  in[2].closed = true;
  loop.ready(kIn + 2, EPOLLIN);
  EXPECT_EQ(reading_ended, std::vector<int>{1}) << "the goodbye has explained it";
  for (const int peer : {1, 2}) {
    EXPECT_TRUE(links->hasEnded(peer));
  }
  EXPECT_EQ(loop.watched(), 0U);
}

TEST_F(PeerLinksTest, ASecondConnectionOfAPeerIsDropped) {
  adopt(1);
  Wire other;
  links->adopt(1, std::make_unique<WireLink>(other, 3000));
  EXPECT_EQ(loop.watched(), 1U);
  EXPECT_TRUE(loop.watches(kIn + 1, EPOLLIN));
}

TEST_F(PeerLinksTest, AGoodbyeIsTheLastFrameOfEachConnectedLink) {
  send(1, 1);
  send(2, 1); // never connects
  connect(1);
  out[1].room = 10;
  EXPECT_TRUE(links->sayGoodbyes());
  EXPECT_TRUE(links->isClosing());
  EXPECT_EQ(goodbyes_said, 0);
  EXPECT_EQ(loop.watched(), 1U) << "the link to rank 2 is given up";
  out[1].room = 1000;
  loop.ready(kOut + 1, EPOLLOUT);
  EXPECT_EQ(left(1).back(), FrameType::Goodbye);
  EXPECT_TRUE(out[1].shut_down);
  EXPECT_EQ(goodbyes_said, 1);
  EXPECT_FALSE(links->isClosing());
  EXPECT_EQ(loop.watched(), 0U);
}

TEST_F(PeerLinksTest, ALinkThatBreaksBeforeItsGoodbyeHasLeftHoldsUpNobody) {
  send(1, 1);
  connect(1);
  out[1].room = 10;
  EXPECT_TRUE(links->sayGoodbyes());
  out[1].broken = true;
  loop.ready(kOut + 1, EPOLLOUT);
  EXPECT_EQ(goodbyes_said, 1);
  EXPECT_FALSE(links->isClosing());
}

TEST_F(PeerLinksTest, ALinkOnWhichOnlyQuestionsWentIsNotMissedAndIsOpenedAgain) {
  for (int i = 0; i < 2; ++i) {
    links->ask(1, OutFrame());
    EXPECT_EQ(loop.watched(), 1U) << i;
    out[1].broken = true;
    loop.ready(kOut + 1, EPOLLOUT);
    EXPECT_EQ(loop.watched(), 0U) << i;
    out[1].broken = false;
  }
  EXPECT_TRUE(writing_broke.empty());
  send(1, 7);
  connect(1);
  EXPECT_EQ(sent.back(), 7);
  links->ask(1, OutFrame());
  loop.ready(kOut + 1, EPOLLHUP);
  EXPECT_EQ(writing_broke, std::vector<int>{1}) << "a frame has gone on it that the peer needs";
}

TEST_F(PeerLinksTest, WithoutALinkThereIsNobodyToSayGoodbyeTo) {
  EXPECT_FALSE(links->sayGoodbyes());
}

TEST_F(PeerLinksTest, AnOutgoingPortGoesForwardExceptThatAFullOneOpensAgain) {
  using State = OutPort::State;
  const std::vector<State> all = {
      State::Connecting, State::Open, State::Full, State::Closing, State::Ended, State::Broken};
  const std::map<State, std::vector<State>> legal = {
      {State::Connecting, {State::Open, State::Broken}},
      {State::Open, {State::Open, State::Full, State::Closing, State::Broken}},
      {State::Full, {State::Open, State::Full, State::Closing, State::Broken}},
      {State::Closing, {State::Ended, State::Broken}},
      {State::Ended, {State::Broken}},
      {State::Broken, {State::Broken}}};
  for (const State now : all) {
    for (const State next : all) {
      const std::vector<State>& may = legal.at(now);
      const bool expected = std::find(may.begin(), may.end(), next) != may.end();
      EXPECT_EQ(OutPort::mayFollow(next, now), expected) << static_cast<int>(now) << " to " << static_cast<int>(next);
    }
  }
}

} // namespace
} // namespace pycomm
