// Acceptor and GreetedLink at a Unix socket: other users of the host, and a group with a secret.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/error_matchers.h"
#include "transport/link_peer.h"
#include "transport/net/acceptor.h"
#include "transport/net/greeted_link.h"
#include "transport/process.h"
#include "within.h"

namespace pycomm::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint64_t kNonce = 77;
constexpr uid_t kOtherUser = 4321;
constexpr int kCrowd = 2000; // more than a queue holds
constexpr size_t kHeld = 500; // connections that stay open, so that an answer would reach them

Hello helloOf(int rank) {
  Hello hello;
  hello.nonce = kNonce;
  hello.rank = rank;
  hello.size = 3;
  hello.group = 5;
  return hello;
}

/// Rank 0 of a group of three, at its Unix socket.
struct UnixEndpoint {
  explicit UnixEndpoint(std::shared_ptr<const TlsContext> tls = nullptr)
      : acceptor(Listener::bindUnix(randomUnixName()), config(std::move(tls))) {}

  static AcceptorConfig config(std::shared_ptr<const TlsContext> tls) {
    AcceptorConfig result;
    result.nonce = kNonce;
    result.group = 5;
    result.size = 3;
    result.rank = 0;
    if (tls != nullptr) {
      result.processes = {tls->self(), newProcessId(), newProcessId()};
      result.tls = std::move(tls);
    }
    return result;
  }

  /// Both ends in turns, until the link is up.
  bool open(Link& link, int timeout_ms = 20000) {
    for (const Deadline deadline = Deadline::after(timeout_ms); !deadline.expired();) {
      poll();
      pollfd ready{link.fd(), link.roomEvent(), 0};
      if (::poll(&ready, 1, 2) == 1 && link.finishConnect()) {
        return true;
      }
    }
    return false;
  }
  void poll() {
    for (Accepted& peer : acceptor.poll(frozen.value_or(Clock::now()))) {
      accepted.push_back(std::move(peer));
    }
  }
  /// Whether the other side of `link` ends before the deadline, while this one polls.
  bool drops(Link& link) {
    std::byte byte{};
    for (const Deadline deadline = soon(); !deadline.expired();) {
      poll();
      try {
        if (link.tryRead({&byte, 1}).closed) {
          return true;
        }
      } catch (const Error&) {
        return true; // a reset: the other side closed over unread bytes
      }
    }
    return false;
  }

  Acceptor acceptor;
  std::vector<Accepted> accepted;
  std::optional<TimePoint> frozen; ///< the time for the acceptor, which drops any stranger after 2 s
};

// A child that runs as another user. It connects `count` times and says each time what a rank would say. At first it fills the queue. The
// last connections stay open until `read`: a reply to those that are closed could not be sent, so they would never be taken for ranks.
bool crowdAsOther(
    const SocketAddress& endpoint,
    int count,
    SharedFlag& full,
    SharedFlag& connected,
    const SharedFlag& read) {
  const std::string hello = encodeHello(helloOf(2));
  std::deque<UniqueFd> held;
  if (::setresuid(kOtherUser, kOtherUser, kOtherUser) != 0) {
    return false;
  }
  for (const Deadline deadline = soon(); connected.value() < count && !deadline.expired();) {
    UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (socket && ::connect(socket.get(), endpoint.raw(), endpoint.rawLength()) == 0) {
      (void)::send(socket.get(), hello.data(), hello.size(), MSG_NOSIGNAL); // it may be dropped already
      connected.raise(connected.value() + 1);
      held.push_back(std::move(socket));
      if (held.size() > kHeld) {
        held.pop_front();
      }
      continue;
    }
    if (errno != EAGAIN) {
      return false;
    }
    full.raise();
    (void)::poll(nullptr, 0, 1);
  }
  return connected.value() == count && read.wait();
}

// All say what rank 2 would say, and none is taken for it: they are dropped before a byte is read. So none is counted either.
TEST(UnixEndpoint, ACrowdOfAnotherUserIsDroppedAndAPeerGetsIn) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root, to become another user";
  }
  UnixEndpoint endpoint;
  SharedFlag full;
  SharedFlag connected;
  SharedFlag read;
  Process crowd([&] { return crowdAsOther(endpoint.acceptor.address(), kCrowd, full, connected, read); });
  ASSERT_TRUE(full.wait()) << "the queue is full before the rank looks at it";
  const int64_t queued = connected.value();
  GreetedLink link({}, endpoint.acceptor.address(), helloOf(1));
  EXPECT_FALSE(link.finishConnect()) << "it waits for room in the queue";
  const TimePoint begin = Clock::now();
  ASSERT_TRUE(endpoint.open(link));
  const int64_t took_ms = elapsedMs(begin);
  ASSERT_EQ(endpoint.accepted.size(), 1U);
  EXPECT_EQ(endpoint.accepted[0].hello.rank, 1);
  for (const Deadline deadline = soon(); connected.value() < kCrowd && !deadline.expired();) {
    endpoint.poll();
  }
  for (int turn = 0; turn < kCrowd; ++turn) { // each takes some from the queue, if there are any
    endpoint.poll();
  }
  read.raise();
  EXPECT_TRUE(crowd.join());
  EXPECT_EQ(endpoint.accepted.size(), 1U) << "a stranger was taken for a rank";
  EXPECT_EQ(endpoint.acceptor.rejected(), 0);
  EXPECT_GT(queued, 64) << "more than are dropped in a turn";
  EXPECT_WITHIN_MS(took_ms, 2000);
}

TEST(UnixEndpoint, AStrangerOfThisUserIsReadLikeOneAtAPort) {
  UnixEndpoint endpoint;
  endpoint.frozen = Clock::now();
  const std::string junk = "GET / HTTP/1.1\r\n\r\n";
  const auto stranger = connectSocket({}, endpoint.acceptor.address(), soon(), kNoAbort);
  writeAll(*stranger, {reinterpret_cast<const std::byte*>(junk.data()), junk.size()}, soon(), kNoAbort);
  EXPECT_TRUE(endpoint.drops(*stranger));
  EXPECT_EQ(endpoint.acceptor.rejected(), 1);
}

// The kernel carries the bytes and says which user is at the other end, so nothing is in TLS. The number in the Hello is derived from
// the secret.
TEST(UnixEndpoint, WithASecretAPeerSpeaksPlainAndMustKnowTheNumber) {
  const auto secret = std::make_shared<const Secret>(Secret::generate());
  UnixEndpoint endpoint(std::make_shared<const TlsContext>(secret, newProcessId()));
  GreetedLink link({}, endpoint.acceptor.address(), helloOf(1));
  ASSERT_TRUE(endpoint.open(link));
  ASSERT_EQ(endpoint.accepted.size(), 1U);
  EXPECT_EQ(endpoint.accepted[0].hello.rank, 1);
  EXPECT_THAT(link.describe(), Not(HasSubstr("(TLS)")));
  EXPECT_THAT(endpoint.accepted[0].link->describe(), Not(HasSubstr("(TLS)")));

  Hello guessed = helloOf(2);
  guessed.nonce = kNonce + 1;
  const ErrorRecord record = errorOf([&] {
    GreetedLink other({}, endpoint.acceptor.address(), guessed);
    (void)endpoint.open(other);
  });
  EXPECT_EQ(record.code, ErrorCode::ConfigMismatch);
  EXPECT_EQ(endpoint.accepted.size(), 1U);
  EXPECT_EQ(endpoint.acceptor.rejected(), 1);
}

TEST(UnixEndpoint, WithASecretNothingAnswersAHandshake) {
  const auto secret = std::make_shared<const Secret>(Secret::generate());
  const auto self = std::make_shared<const TlsContext>(secret, newProcessId());
  UnixEndpoint endpoint(self);
  const ErrorRecord record = errorOf([&] {
    const auto client = std::make_shared<const TlsContext>(secret, newProcessId());
    GreetedLink link({}, endpoint.acceptor.address(), helloOf(1), {client, self->self()});
    (void)endpoint.open(link, 5000);
  });
  EXPECT_EQ(record.code, ErrorCode::ConfigMismatch);
  EXPECT_TRUE(endpoint.accepted.empty());
  EXPECT_EQ(endpoint.acceptor.rejected(), 1);
}

} // namespace
} // namespace pycomm::testing
