#include "transport/net/greeted_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/fault_point.h"
#include "transport/error_matchers.h"
#include "transport/loopback.h"
#include "transport/net/acceptor.h"

namespace pycomm::testing {
namespace {

using ::testing::HasSubstr;

Hello hello() {
  Hello hello;
  hello.nonce = 77;
  hello.rank = 1;
  hello.size = 4;
  hello.group = 5;
  return hello;
}

/// A peer that does with each connection what the test says.
class Server {
 public:
  using Serve = std::function<void(SocketLink& link, int nth)>;

  explicit Server(Serve serve) : serve_(std::move(serve)), listener_(Listener::bind(kLoopback, {})) {}

  // Both ends in turns, until the link is up: finishConnect() is called when the descriptor that it names is ready, and only then, as a
  // loop would. False if that is not in time.
  bool bringUp(GreetedLink& link, int timeout_ms = 10000) {
    for (const Deadline deadline = Deadline::after(timeout_ms); !deadline.expired();) {
      while (auto incoming = listener_ ? listener_.accept() : std::nullopt) {
        links_.push_back(std::make_unique<SocketLink>(std::move(incoming->fd)));
        serve_(*links_.back(), static_cast<int>(links_.size()));
        if (dropped_) {
          links_.back() = nullptr;
          dropped_ = false;
        }
      }
      pollfd ready{link.fd(), link.roomEvent(), 0};
      if (::poll(&ready, 1, 5) == 1) {
        ++wakes;
        if (link.finishConnect()) {
          return true;
        }
      }
    }
    return false;
  }
  void dropThis() {
    dropped_ = true;
  }
  void close() {
    listener_ = Listener();
  }
  [[nodiscard]] const SocketAddress& address() const {
    return listener_.address();
  }
  [[nodiscard]] size_t connections() const {
    return links_.size();
  }

  int wakes = 0;

 private:
  Serve serve_;
  Listener listener_;
  std::vector<std::unique_ptr<SocketLink>> links_;
  bool dropped_ = false;
};

void writeText(Link& link, const std::string& text) {
  writeAll(link, {reinterpret_cast<const std::byte*>(text.data()), text.size()}, Deadline::after(5000), kNoAbort);
}

std::string readHello(Link& link) {
  std::string bytes(kHelloNbytes, '\0');
  readAll(link, {reinterpret_cast<std::byte*>(bytes.data()), bytes.size()}, Deadline::after(5000), kNoAbort);
  return bytes;
}

TEST(GreetedLink, IsUpOnceThePeerHasReplied) {
  SocketLink* reader = nullptr;
  Server peer([&](SocketLink& link, int) { reader = &link; });
  GreetedLink link({}, peer.address(), hello());
  EXPECT_FALSE(peer.bringUp(link, 300)) << "connected and greeted is not accepted";
  ASSERT_NE(reader, nullptr);
  EXPECT_EQ(readHello(*reader), encodeHello(hello()));
  EXPECT_EQ(link.roomEvent(), POLLIN);
  EXPECT_LT(peer.wakes, 10) << "it waits for the reply and does not spin";
  writeText(*reader, encodeHelloAccepted(5) + "!"); // and nothing beyond the reply is taken
  ASSERT_TRUE(peer.bringUp(link));
  EXPECT_EQ(link.roomEvent(), POLLOUT);
  EXPECT_EQ(link.drops(), 0);
  std::byte next{};
  readAll(link, {&next, 1}, Deadline::after(5000), kNoAbort);
  EXPECT_EQ(next, std::byte{'!'});
}

// By an orderly end or by a reset (unread bytes), before and after the Hello: all of them are "try again".
TEST(GreetedLink, ConnectsAgainWhenItIsDroppedBeforeTheReply) {
  Server* self = nullptr;
  Server peer([&](SocketLink& link, int nth) {
    if (nth <= 3) {
      if (nth == 2) {
        (void)readHello(link);
      } else if (nth == 3) {
        writeText(link, encodeHelloAccepted(5).substr(0, 63)); // a part of a reply is none
      }
      self->dropThis();
      return;
    }
    EXPECT_EQ(readHello(link), encodeHello(hello()));
    writeText(link, encodeHelloAccepted(5));
  });
  self = &peer;
  const TimePoint begin = Clock::now();
  GreetedLink link({}, peer.address(), hello());
  ASSERT_TRUE(peer.bringUp(link));
  EXPECT_EQ(link.drops(), 3);
  EXPECT_EQ(peer.connections(), 4U);
  EXPECT_LT(elapsedMs(begin), 5000);
  EXPECT_GE(elapsedMs(begin), 5 + 10 + 20) << "with pauses between";
}

TEST(GreetedLink, EndsWhenThePeerHasGone) {
  Server* self = nullptr;
  Server peer([&](SocketLink&, int) {
    self->dropThis();
    self->close();
  });
  self = &peer;
  GreetedLink link({}, peer.address(), hello());
  const TimePoint begin = Clock::now();
  const ErrorRecord record = errorOf([&] { (void)peer.bringUp(link); });
  EXPECT_EQ(record.code, ErrorCode::ConnectFailed);
  EXPECT_THAT(record.cause, HasSubstr("ECONNREFUSED"));
  EXPECT_LT(elapsedMs(begin), 5000);
}

TEST(GreetedLink, GivesTheReasonOfARefusal) {
  ErrorRecord reason;
  reason.code = ErrorCode::ConfigMismatch;
  reason.summary = "the two sides have world sizes 4 and 9";
  Server peer([&](SocketLink& link, int) { writeText(link, encodeHelloRefused(reason)); });
  GreetedLink link({}, peer.address(), hello());
  const ErrorRecord record = errorOf([&] { (void)peer.bringUp(link); });
  EXPECT_EQ(record.code, ErrorCode::ConfigMismatch);
  EXPECT_EQ(record.summary, reason.summary);
  EXPECT_EQ(peer.connections(), 1U) << "a refusal is final";
}

TEST(GreetedLink, BelievesNoReplyThatIsNone) {
  const auto reply = [](const std::function<void(FrameHeader&)>& change) {
    std::string bytes = encodeHelloAccepted(5);
    FrameHeader header;
    std::memcpy(static_cast<void*>(&header), bytes.data(), sizeof header);
    change(header);
    return std::string(reinterpret_cast<const char*>(&header), sizeof header);
  };
  const std::vector<std::string> replies = {
      "HTTP/1.1 400 Bad Request\r\n" + std::string(100, ' '),
      reply([](FrameHeader& header) { header.type = FrameType::Data; }),
      reply([](FrameHeader& header) { header.group = 6; }),
      reply([](FrameHeader& header) { header.payload_nbytes = UINT32_MAX; }),
      reply([](FrameHeader& header) { header.payload_nbytes = ErrorRecord::kMaxSerializedNbytes + 1; }),
      reply([](FrameHeader& header) { header.payload_nbytes = 7; }) + "garbage"};
  for (const std::string& bytes : replies) {
    Server peer([&](SocketLink& link, int) { writeText(link, bytes); });
    GreetedLink link({}, peer.address(), hello());
    EXPECT_EQ(errorOf([&] { (void)peer.bringUp(link); }).code, ErrorCode::ProtocolViolation) << bytes;
    EXPECT_EQ(peer.connections(), 1U);
  }
}

/// Watches a link as the data loop does: it registers a descriptor with the kernel only when the link names another one.
class Watcher {
 public:
  bool bringUp(Link& link, int timeout_ms) {
    for (const Deadline deadline = Deadline::after(timeout_ms); !deadline.expired();) {
      watch(link);
      epoll_event ready{};
      if (::epoll_wait(epoll_.get(), &ready, 1, deadline.remainingMs(100)) == 1 && link.finishConnect()) {
        watch(link);
        return true;
      }
    }
    return false;
  }

 private:
  void watch(const Link& link) {
    epoll_event event{};
    event.events = static_cast<uint32_t>(link.roomEvent());
    const bool same = link.fd() == watched_;
    if (same && event.events == events_) {
      return;
    }
    if (watched_ >= 0 && !same) {
      EXPECT_EQ(::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, watched_, nullptr), 0) << "it was closed while it was watched";
    }
    watched_ = link.fd();
    events_ = event.events;
    EXPECT_EQ(::epoll_ctl(epoll_.get(), same ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, watched_, &event), 0);
  }

  UniqueFd epoll_ = UniqueFd::from([] { return ::epoll_create1(EPOLL_CLOEXEC); });
  int watched_ = -1;
  uint32_t events_ = 0;
};

enum class Answer { Accept, AcceptLate, Drop, DropAfterHello, DropInReply };
constexpr int kAnswers = 5;

/// A link whose connections are dropped and accepted as the seed says. True once it is up.
bool bringUpInAnyOrder(uint32_t seed) {
  Listener listener = Listener::bind(kLoopback, {});
  std::atomic<bool> up{false};
  std::thread peer([&] {
    std::mt19937 random(seed);
    std::vector<std::unique_ptr<SocketLink>> accepted;
    for (const Deadline deadline = Deadline::after(20000); !up && !deadline.expired();) {
      pollfd ready{listener.fd(), POLLIN, 0};
      (void)::poll(&ready, 1, 5);
      auto incoming = listener.accept();
      if (!incoming) {
        continue;
      }
      auto link = std::make_unique<SocketLink>(std::move(incoming->fd));
      const auto answer = static_cast<Answer>(random() % kAnswers);
      try {
        if (answer == Answer::AcceptLate || answer == Answer::DropAfterHello) {
          (void)readHello(*link);
        }
        if (answer == Answer::DropInReply) {
          writeText(*link, encodeHelloAccepted(5).substr(0, 63));
        } else if (answer == Answer::Accept || answer == Answer::AcceptLate) {
          writeText(*link, encodeHelloAccepted(5));
          accepted.push_back(std::move(link));
        }
      } catch (const Error&) { // this end has gone
      }
    }
  });
  // In between, the answer of a peer that does not wait for the Hello arrives: connected, greeted and accepted, or dropped, in one call.
  armFaultPoints("hello.sent:1+:delay=2");
  GreetedLink link(SocketAddress(), listener.address(), hello());
  up = Watcher().bringUp(link, 10000);
  armFaultPoints("");
  const bool came_up = up;
  up = true;
  peer.join();
  return came_up;
}

TEST(GreetedLink, IsWatchedUntilItIsUpWhateverThePeerDoes) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  for (uint32_t seed = 0; seed < 60; ++seed) {
    ASSERT_TRUE(bringUpInAnyOrder(seed)) << "seed " << seed;
  }
}

TEST(GreetedLink, IsALinkAlsoIfItCannotConnectAgain) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  Server* self = nullptr;
  Server peer([&](SocketLink&, int) { self->dropThis(); });
  self = &peer;
  armFaultPoints("socket.connect:2:errno=ENETUNREACH");
  GreetedLink link({}, peer.address(), hello());
  const ErrorRecord record = errorOf([&] { (void)peer.bringUp(link); });
  armFaultPoints("");
  EXPECT_EQ(record.code, ErrorCode::ConnectFailed);
  EXPECT_THAT(link.describe(), HasSubstr(peer.address().text()));
  EXPECT_GE(link.fd(), 0);
}

// A peer of the first wire version. The first bytes of what it writes mean the same in all versions, and no other does.
TEST(GreetedLink, NamesBothVersionsToAnOlderOrNewerPeer) {
  for (const uint8_t version : {1, 9}) {
    ErrorRecord reason;
    reason.code = ErrorCode::VersionMismatch;
    reason.summary = "10.0.0.2:29600 refused a connection: wire version 2 meets version 1";
    for (std::string bytes :
         {encodeHelloRefused(reason), encodeHelloAccepted(5), std::string("cy\x01\x02 something else")}) {
      bytes[2] = static_cast<char>(version);
      bytes.resize(std::max<size_t>(bytes.size(), sizeof(FrameHeader)), '\xff');
      Server peer([&](SocketLink& link, int) { writeText(link, bytes); });
      GreetedLink link({}, peer.address(), hello());
      const ErrorRecord record = errorOf([&] { (void)peer.bringUp(link); });
      EXPECT_EQ(record.code, ErrorCode::VersionMismatch) << record.text();
      EXPECT_THAT(
          record.summary,
          HasSubstr(
              "the peer speaks pycomm wire version " + std::to_string(version) + " and this rank version " +
              std::to_string(FrameHeader::kVersion)));
      EXPECT_THAT(record.summary, HasSubstr(peer.address().text()));
      EXPECT_EQ(record.hint, "install the same pycomm on all hosts");
      EXPECT_EQ(peer.connections(), 1U) << "it is final";
    }
  }
}

// With the real other side.
TEST(GreetedLink, IsAcceptedByAnAcceptor) {
  AcceptorConfig config;
  config.nonce = 77;
  config.group = 5;
  config.size = 4;
  Acceptor acceptor(Listener::bind(kLoopback, {}), config);
  GreetedLink link({}, acceptor.address(), hello());
  std::vector<Accepted> accepted;
  for (const Deadline deadline = Deadline::after(10000); !link.finishConnect();) {
    ASSERT_FALSE(deadline.expired());
    for (Accepted& peer : acceptor.poll(Clock::now())) {
      accepted.push_back(std::move(peer));
    }
  }
  ASSERT_EQ(accepted.size(), 1U);
  EXPECT_EQ(accepted[0].hello.rank, 1);
  writeText(*accepted[0].link, "x");
  std::byte next{};
  readAll(link, {&next, 1}, Deadline::after(5000), kNoAbort);
  EXPECT_EQ(next, std::byte{'x'});
}

// The queue of a Unix socket is full: its process has not come to accept for a while.
TEST(GreetedLink, WaitsForRoomInTheQueueOfAUnixSocket) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  AcceptorConfig config;
  config.nonce = hello().nonce;
  config.group = hello().group;
  config.size = hello().size;
  Acceptor acceptor(Listener::bindUnix(randomUnixName()), config);
  armFaultPoints("socket.connect:1:errno=EAGAIN,socket.connect:2:errno=EAGAIN");
  GreetedLink link({}, acceptor.address(), hello());
  EXPECT_THAT(link.describe(), HasSubstr(acceptor.address().text()));
  bool up = false;
  for (const Deadline deadline = Deadline::after(10000); !up && !deadline.expired();) {
    pollfd ready{link.fd(), link.roomEvent(), 0};
    if (::poll(&ready, 1, 5) == 1) {
      up = link.finishConnect();
    }
    (void)acceptor.poll(Clock::now());
  }
  armFaultPoints("");
  EXPECT_TRUE(up);
  EXPECT_EQ(link.drops(), 2);
  // Over TCP the same errno means that no port is left.
  armFaultPoints("socket.connect:1:errno=EAGAIN");
  EXPECT_EQ(errorOf([&] { GreetedLink tcp({}, kLoopback.withPort(1), hello()); }).code, ErrorCode::ConnectFailed);
  armFaultPoints("");
}

} // namespace
} // namespace pycomm::testing
