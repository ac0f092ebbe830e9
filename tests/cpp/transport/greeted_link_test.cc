#include "transport/greeted_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/acceptor.h"
#include "transport/error_matchers.h"

namespace pycomm::testing {
namespace {

using ::testing::HasSubstr;

const SocketAddress kLoopback = SocketAddress::parse("127.0.0.1", 0);

Hello hello() {
  Hello hello;
  hello.nonce = 77;
  hello.rank = 1;
  hello.size = 4;
  hello.group = 5;
  return hello;
}

/// A peer that does with each connection what the test says.
class Peer {
 public:
  using Serve = std::function<void(TcpLink& link, int nth)>;

  explicit Peer(Serve serve) : serve_(std::move(serve)), listener_(Listener::bind(kLoopback, {})) {}

  // Both ends in turns, until the link is up: finishConnect() is called when the descriptor that it names is ready, and only then, as a
  // loop would. False if that is not in time.
  bool bringUp(GreetedLink& link, int timeout_ms = 10000) {
    for (const Deadline deadline = Deadline::after(timeout_ms); !deadline.expired();) {
      while (auto incoming = listener_ ? listener_.accept() : std::nullopt) {
        links_.push_back(std::make_unique<TcpLink>(std::move(incoming->fd)));
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
  std::vector<std::unique_ptr<TcpLink>> links_;
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
  TcpLink* reader = nullptr;
  Peer peer([&](TcpLink& link, int) { reader = &link; });
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
  Peer* self = nullptr;
  Peer peer([&](TcpLink& link, int nth) {
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
  Peer* self = nullptr;
  Peer peer([&](TcpLink&, int) {
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
  Peer peer([&](TcpLink& link, int) { writeText(link, encodeHelloRefused(reason)); });
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
      reply([](FrameHeader& header) { header.version = 9; }),
      reply([](FrameHeader& header) { header.group = 6; }),
      reply([](FrameHeader& header) { header.payload_nbytes = UINT32_MAX; }),
      reply([](FrameHeader& header) { header.payload_nbytes = ErrorRecord::kMaxSerializedNbytes + 1; }),
      reply([](FrameHeader& header) { header.payload_nbytes = 7; }) + "garbage"};
  for (const std::string& bytes : replies) {
    Peer peer([&](TcpLink& link, int) { writeText(link, bytes); });
    GreetedLink link({}, peer.address(), hello());
    EXPECT_EQ(errorOf([&] { (void)peer.bringUp(link); }).code, ErrorCode::ProtocolViolation) << bytes;
    EXPECT_EQ(peer.connections(), 1U);
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

} // namespace
} // namespace pycomm::testing
