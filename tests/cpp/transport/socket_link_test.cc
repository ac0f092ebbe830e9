#include "transport/net/socket_link.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <thread>

#include "base/unique_fd.h"
#include "transport/link_conformance.h"
#include "transport/link_peer.h"
#include "transport/reserved_port.h"
#include "transport/socket_pairs.h"

namespace pycomm {
namespace {

using testing::acceptOne;
using testing::elapsedMs;
using testing::errorOf;
using ::testing::HasSubstr;
using testing::kLoopback;
using testing::kNoAbort;
using testing::LinkCase;
using testing::LinkConformance;
using testing::LinkPair;
using testing::PeerPlace;
using testing::soon;
using testing::tcpPair;

LinkPair unixPair() {
  Listener listener = Listener::bindUnix(randomUnixName());
  auto first = connectSocket({}, listener.address(), Deadline::after(10000), AbortToken());
  return {std::move(first), acceptOne(listener)};
}

bool hasIPv6Loopback() {
  try {
    (void)Listener::bind(SocketAddress::parse("::1", 0), {});
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::vector<LinkCase> tcpCases() {
  std::vector<LinkCase> cases = {{"TcpIPv4", [] { return tcpPair(kLoopback); }}};
  if (hasIPv6Loopback()) {
    cases.push_back({"TcpIPv6", [] { return tcpPair(SocketAddress::parse("::1", 0)); }});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(
    Tcp,
    LinkConformance,
    ::testing::Combine(::testing::ValuesIn(tcpCases()), ::testing::Values(PeerPlace::Thread, PeerPlace::Process)),
    [](const auto& test) {
      return std::get<0>(test.param).name + (std::get<1>(test.param) == PeerPlace::Thread ? "Thread" : "Process");
    });

INSTANTIATE_TEST_SUITE_P(
    Unix,
    LinkConformance,
    ::testing::Combine(
        ::testing::Values(LinkCase{"Unix", unixPair}),
        ::testing::Values(PeerPlace::Thread, PeerPlace::Process)),
    [](const auto& test) {
      return std::get<0>(test.param).name + (std::get<1>(test.param) == PeerPlace::Thread ? "Thread" : "Process");
    });

int option(int fd, int level, int name) {
  int value = -1;
  socklen_t length = sizeof value;
  (void)::getsockopt(fd, level, name, &value, &length);
  return value;
}

TEST(SocketLink, SetsItsSocketUp) {
  Listener listener = Listener::bind(kLoopback, {});
  const auto link = connectSocket(kLoopback, listener.address(), Deadline::after(10000), AbortToken());
  EXPECT_EQ(option(link->fd(), IPPROTO_TCP, TCP_NODELAY), 1);
  EXPECT_EQ(option(link->fd(), SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_EQ(option(link->fd(), IPPROTO_TCP, TCP_KEEPIDLE), 10);
  EXPECT_EQ(option(link->fd(), IPPROTO_TCP, TCP_KEEPINTVL), 5);
  EXPECT_EQ(option(link->fd(), IPPROTO_TCP, TCP_KEEPCNT), 3);
  EXPECT_NE(::fcntl(link->fd(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(::fcntl(link->fd(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ(link->describe(), link->local().text() + " -> " + listener.address().text());
  EXPECT_EQ(acceptOne(listener)->remote(), link->local());
}

TEST(SocketLink, ConnectsFromTheGivenAddress) {
  Listener listener = Listener::bind(kLoopback, {});
  const auto link =
      connectSocket(SocketAddress::parse("127.0.0.5", 0), listener.address(), Deadline::after(10000), AbortToken());
  EXPECT_EQ(link->local().ip(), "127.0.0.5");
}

// A Unix socket hangs up at once when the peer closes, also if it has read everything. What the peer wrote before is still to be read.
TEST(UnixLink, AnOrderlyEndIsNoResetAlsoIfWordsOfThePeerAreUnread) {
  for (const size_t unread : {size_t{0}, size_t{100000}}) {
    LinkPair pair = unixPair();
    const std::string said(unread, 'g');
    writeAll(*pair.second, {reinterpret_cast<const std::byte*>(said.data()), said.size()}, soon(), kNoAbort);
    pair.second.reset();
    pollfd ready{pair.first->fd(), 0, 0};
    ASSERT_EQ(::poll(&ready, 1, 10000), 1);
    EXPECT_NE(ready.revents & POLLHUP, 0) << "which is what a loop sees";
    EXPECT_FALSE(pair.first->isReset()) << unread;
    const std::byte byte{};
    const ConstBufferView view(&byte, 1);
    EXPECT_EQ(errorOf([&] { (void)pair.first->tryWrite(&view, 1); }).code, ErrorCode::ConnectionReset);
  }
}

TEST(UnixLink, AnEndOverBytesThatThePeerHasNotReadIsAReset) {
  for (const size_t unread : {size_t{0}, size_t{1000}}) {
    LinkPair pair = unixPair();
    const std::string said(unread, 'g');
    writeAll(*pair.second, {reinterpret_cast<const std::byte*>(said.data()), said.size()}, soon(), kNoAbort);
    const std::byte byte{};
    writeAll(*pair.first, {&byte, 1}, soon(), kNoAbort);
    pair.second.reset();
    EXPECT_TRUE(pair.first->isReset()) << unread;
  }
}

TEST(SocketLink, AResetOverTcpIsOne) {
  auto [first, second] = tcpPair();
  const linger at_once{1, 0};
  ASSERT_EQ(::setsockopt(second->fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once), 0);
  second.reset();
  pollfd reset{first->fd(), 0, 0};
  ASSERT_EQ(::poll(&reset, 1, 10000), 1);
  EXPECT_TRUE(first->isReset());
}

// The reader sees the end, and not the reset that came behind it.
TEST(SocketLink, AResetOverTcpBehindAnEndIsOne) {
  auto [first, second] = tcpPair();
  const std::byte byte{};
  writeAll(*first, {&byte, 1}, soon(), kNoAbort);
  pollfd arrived{second->fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&arrived, 1, 10000), 1);
  second->shutdownWrite();
  pollfd ended{first->fd(), POLLRDHUP, 0};
  ASSERT_EQ(::poll(&ended, 1, 10000), 1);
  second.reset(); // over the byte, so the kernel resets
  pollfd reset{first->fd(), 0, 0};
  ASSERT_EQ(::poll(&reset, 1, 10000), 1);
  EXPECT_TRUE(first->isReset());
}

TEST(StartConnect, FinishesLater) {
  Listener listener = Listener::bind(kLoopback, {});
  const auto link = startConnect(kLoopback, listener.address());
  for (const Deadline deadline = Deadline::after(10000); !link->finishConnect() && !deadline.expired();) {
    pollfd wait{link->fd(), POLLOUT, 0};
    (void)::poll(&wait, 1, 100);
  }
  EXPECT_TRUE(link->finishConnect());
  EXPECT_TRUE(link->finishConnect());
  EXPECT_EQ(acceptOne(listener)->remote(), link->local());
}

/// A port that nobody else gets and that refuses connections, until listen().
class ClosedPort : public testing::ReservedPort {
 public:
  [[nodiscard]] SocketAddress address() const {
    return SocketAddress::parse("127.0.0.1", number());
  }
  void listen() {
    EXPECT_EQ(::listen(socket_.get(), 1), 0);
  }
  /// Of the next connection.
  [[nodiscard]] SocketAddress acceptedFrom() const {
    sockaddr_in peer{};
    socklen_t nbytes = sizeof peer;
    const UniqueFd accepted(::accept(socket_.get(), reinterpret_cast<sockaddr*>(&peer), &nbytes));
    EXPECT_TRUE(accepted);
    return SocketAddress::parse("127.0.0.1", ntohs(peer.sin_port));
  }
};

TEST(StartConnect, SaysWhyItFailed) {
  ClosedPort port;
  const SocketAddress remote = port.address();
  const ErrorRecord record = errorOf([&] {
    const auto link = startConnect(kLoopback, remote);
    for (const Deadline deadline = Deadline::after(10000); !link->finishConnect() && !deadline.expired();) {
      pollfd wait{link->fd(), POLLOUT, 0};
      (void)::poll(&wait, 1, 100);
    }
  });
  EXPECT_EQ(record.code, ErrorCode::ConnectFailed);
  EXPECT_THAT(record.cause, HasSubstr("ECONNREFUSED"));
  EXPECT_THAT(record.summary, HasSubstr(remote.text()));
}

TEST(ConnectTcp, TriesUntilThePeerListens) {
  ClosedPort port;
  const SocketAddress remote = port.address();
  std::unique_ptr<SocketLink> link;
  std::thread connecting([&] { link = connectSocket(kLoopback, remote, Deadline::after(20000), AbortToken()); });
  // Listen only after a refusal has surely happened.
  (void)::poll(nullptr, 0, 50);
  port.listen();
  connecting.join();
  ASSERT_TRUE(link);
  EXPECT_EQ(port.acceptedFrom(), link->local());
}

TEST(ConnectTcp, GivesUpAtTheDeadlineAndSaysWhatItTried) {
  ClosedPort port;
  const SocketAddress remote = port.address();
  const TimePoint begin = Clock::now();
  const ErrorRecord record =
      errorOf([&] { (void)connectSocket(kLoopback, remote, Deadline::after(2000, begin), AbortToken()); });
  EXPECT_EQ(record.code, ErrorCode::ConnectFailed);
  EXPECT_THAT(record.summary, HasSubstr(remote.text()));
  EXPECT_THAT(record.summary, HasSubstr("from 127.0.0.1 on lo"));
  EXPECT_THAT(record.summary, HasSubstr("attempts"));
  EXPECT_THAT(record.cause, HasSubstr("ECONNREFUSED"));
  EXPECT_GE(record.elapsed_ms, 2000);
  EXPECT_GE(elapsedMs(begin), 2000);
  EXPECT_WITHIN_MS(elapsedMs(begin), 10000);
}

TEST(ConnectTcp, GivesUpAtOnceWhereTryingAgainCannotHelp) {
  const TimePoint begin = Clock::now();
  const ErrorRecord record = errorOf([] {
    (void)connectSocket(
        kLoopback, SocketAddress::parse("::1", 1), Deadline::after(20000), AbortToken()); // two families
  });
  EXPECT_EQ(record.code, ErrorCode::ConnectFailed);
  EXPECT_THAT(record.summary, HasSubstr("after 1 attempt"));
  EXPECT_WITHIN_MS(elapsedMs(begin), 10000);
}

TEST(ConnectTcp, EndsWhenAborted) {
  ClosedPort port;
  const SocketAddress remote = port.address();
  AbortToken abort;
  ErrorRecord reason;
  reason.code = ErrorCode::Aborted;
  std::thread aborting([&] {
    (void)::poll(nullptr, 0, 50);
    abort.abort(reason);
  });
  const TimePoint begin = Clock::now();
  EXPECT_EQ(
      errorOf([&] { (void)connectSocket(kLoopback, remote, Deadline::after(30000), abort); }).code, ErrorCode::Aborted);
  EXPECT_WITHIN_MS(elapsedMs(begin), 10000);
  aborting.join();
}

} // namespace
} // namespace pycomm
