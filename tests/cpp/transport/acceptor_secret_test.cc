// Acceptor and GreetedLink with a secret: who gets in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "transport/error_matchers.h"
#include "transport/link_peer.h"
#include "transport/loopback.h"
#include "transport/net/acceptor.h"
#include "transport/net/greeted_link.h"
#include "transport/secure/tls_contexts.h"
#include "transport/socket_pairs.h"

namespace pycomm::testing {
namespace {

using ::testing::HasSubstr;

Hello helloOf(int rank) {
  Hello hello;
  hello.nonce = 77;
  hello.rank = rank;
  hello.size = 3;
  hello.group = 5;
  return hello;
}

/// Rank 0 of a group of three.
struct Endpoint {
  explicit Endpoint(bool secret = true) : acceptor(Listener::bind(kLoopback, {}), config(secret)) {}

  AcceptorConfig config(bool secret) {
    AcceptorConfig result;
    result.nonce = 77;
    result.group = 5;
    result.size = 3;
    result.rank = 0;
    if (secret) {
      result.tls = self;
      result.processes = {self->self(), first->self(), second->self()};
    }
    return result;
  }

  /// Both ends in turns, until the link is up.
  bool open(Link& link, int timeout_ms = 20000) {
    for (const Deadline deadline = Deadline::after(timeout_ms); !deadline.expired();) {
      for (Accepted& peer : acceptor.poll(frozen.value_or(Clock::now()))) {
        accepted.push_back(std::move(peer));
      }
      pollfd ready{link.fd(), link.roomEvent(), 0};
      if (::poll(&ready, 1, 2) == 1 && link.finishConnect()) {
        return true;
      }
    }
    return false;
  }
  ErrorRecord refusal(const Hello& hello, const TlsTarget& target) {
    return errorOf([&] {
      GreetedLink link({}, acceptor.address(), hello, target);
      (void)open(link);
    });
  }

  Context self = newContext();
  Context first = newContext();
  Context second = newContext();
  Acceptor acceptor;
  std::vector<Accepted> accepted;
  std::optional<TimePoint> frozen; ///< the time for the acceptor in open(); it drops any stranger after 2 s
};

TEST(AcceptorSecret, APeerGetsInAndBothCanSpeak) {
  Endpoint endpoint;
  GreetedLink link({}, endpoint.acceptor.address(), helloOf(1), {endpoint.first, endpoint.self->self()});
  ASSERT_TRUE(endpoint.open(link));
  ASSERT_EQ(endpoint.accepted.size(), 1U);
  EXPECT_EQ(endpoint.accepted[0].hello.rank, 1);
  EXPECT_THAT(link.describe(), HasSubstr("(TLS)"));
  EXPECT_THAT(endpoint.accepted[0].link->describe(), HasSubstr("(TLS)"));
  const std::string text = "both ways";
  Link* const ends[] = {&link, endpoint.accepted[0].link.get()};
  for (const int from : {0, 1}) {
    std::string got(text.size(), ' ');
    writeAll(*ends[from], {reinterpret_cast<const std::byte*>(text.data()), text.size()}, soon(), kNoAbort);
    readAll(*ends[1 - from], {reinterpret_cast<std::byte*>(got.data()), got.size()}, soon(), kNoAbort);
    EXPECT_EQ(got, text);
  }
}

// Bytes behind the Hello are in the link's memory and no longer in the kernel's.
TEST(AcceptorSecret, WhatFollowsTheReplyAtOnceIsNotLost) {
  Endpoint endpoint;
  GreetedLink link({}, endpoint.acceptor.address(), helloOf(1), {endpoint.first, endpoint.self->self()});
  const std::string text = "at once";
  for (const Deadline deadline = soon(); endpoint.accepted.empty() && !deadline.expired();) {
    (void)link.finishConnect();
    for (Accepted& peer : endpoint.acceptor.poll(Clock::now())) {
      endpoint.accepted.push_back(std::move(peer));
    }
  }
  ASSERT_EQ(endpoint.accepted.size(), 1U);
  writeAll(
      *endpoint.accepted[0].link, {reinterpret_cast<const std::byte*>(text.data()), text.size()}, soon(), kNoAbort);
  ASSERT_TRUE(waitConnected(link, soon(), kNoAbort));
  EXPECT_TRUE(link.buffered());
  std::string got(text.size(), ' ');
  ASSERT_EQ(link.tryRead({reinterpret_cast<std::byte*>(got.data()), got.size()}).nbytes, text.size());
  EXPECT_EQ(got, text);
}

// A member that says it is another rank, and one of another group with the same secret.
TEST(AcceptorSecret, ARankIsTakenFromItsOwnProcessOnly) {
  Endpoint endpoint;
  for (const Context& process : {endpoint.second, newContext()}) {
    const int64_t before = endpoint.acceptor.rejected();
    GreetedLink link({}, endpoint.acceptor.address(), helloOf(1), {process, endpoint.self->self()});
    for (const Deadline deadline = soon(); endpoint.acceptor.rejected() == before && !deadline.expired();) {
      EXPECT_FALSE(endpoint.open(link, 300)); // it is dropped, and tries again
    }
    EXPECT_GT(endpoint.acceptor.rejected(), before);
    EXPECT_TRUE(endpoint.accepted.empty());
  }
}

TEST(AcceptorSecret, AnotherSecretOrAnotherProcessIsRefusedForGood) {
  Endpoint endpoint;
  const auto other = std::make_shared<const Secret>(Secret::generate());
  ErrorRecord record = endpoint.refusal(helloOf(1), {newContext(other), endpoint.self->self()});
  EXPECT_EQ(record.code, ErrorCode::ConfigMismatch);
  EXPECT_THAT(record.summary, HasSubstr("with the secret of key id " + other->keyId() + " does not listen there"));
  record = endpoint.refusal(helloOf(1), {endpoint.first, newProcessId()});
  EXPECT_EQ(record.code, ErrorCode::ConfigMismatch);
  EXPECT_TRUE(endpoint.accepted.empty());
}

TEST(AcceptorSecret, APlainPeerIsToldWhy) {
  Endpoint endpoint;
  const ErrorRecord record = endpoint.refusal(helloOf(1), {});
  EXPECT_EQ(record.code, ErrorCode::ConfigMismatch);
  EXPECT_THAT(record.summary, HasSubstr("this port belongs to a job with a secret"));
  EXPECT_EQ(record.host, "");
  EXPECT_TRUE(endpoint.accepted.empty());
}

TEST(AcceptorSecret, APlainPortTellsAPeerWithASecretWhy) {
  Endpoint endpoint(false);
  const ErrorRecord record = endpoint.refusal(helloOf(1), {endpoint.first, endpoint.self->self()});
  EXPECT_EQ(record.code, ErrorCode::ConfigMismatch);
  EXPECT_THAT(record.summary, HasSubstr("the peer has no secret, and this process has one"));
  EXPECT_TRUE(endpoint.accepted.empty());
}

// Neither its own kind of noise nor TLS without the key costs more than a drop.
TEST(AcceptorSecret, StrangersAreDropped) {
  Endpoint endpoint;
  const std::string hello = std::string("\x16\x03\x01\x00\x05", 5) + "hello";
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"), hello, std::string("\x16"), std::string("c")}) {
    const int64_t before = endpoint.acceptor.rejected();
    const auto stranger = connectSocket(kLoopback, endpoint.acceptor.address(), soon(), kNoAbort);
    writeAll(*stranger, {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, soon(), kNoAbort);
    stranger->shutdownWrite();
    for (const Deadline deadline = soon(); endpoint.acceptor.rejected() == before && !deadline.expired();) {
      EXPECT_TRUE(endpoint.acceptor.poll(Clock::now()).empty());
    }
    EXPECT_EQ(endpoint.acceptor.rejected(), before + 1);
  }
}

// Each of the crowd says one byte that may begin a handshake.
TEST(AcceptorSecret, ACrowdOfStrangersSendsNoPeerAwayInItsHandshake) {
  Endpoint endpoint;
  const TimePoint still = Clock::now(); // no stranger gets old enough to be dropped
  endpoint.frozen = still;
  GreetedLink link({}, endpoint.acceptor.address(), helloOf(1), {endpoint.first, endpoint.self->self()});
  pollfd ready{link.fd(), POLLIN, 0};
  for (const Deadline deadline = soon(); ::poll(&ready, 1, 2) != 1;) { // until the server has answered
    ASSERT_FALSE(deadline.expired());
    (void)link.finishConnect();
    ASSERT_TRUE(endpoint.acceptor.poll(still).empty());
    ready.fd = link.fd();
  }
  constexpr int kCrowd = 100;
  constexpr int kPlaces = 64; // kMaxStrangers
  std::vector<std::unique_ptr<SocketLink>> crowd;
  const std::byte first{0x16};
  for (int i = 0; i < kCrowd; ++i) {
    crowd.push_back(connectSocket(kLoopback, endpoint.acceptor.address(), soon(), kNoAbort));
    writeAll(*crowd.back(), {&first, 1}, soon(), kNoAbort);
    ASSERT_TRUE(endpoint.acceptor.poll(still).empty());
  }
  for (const Deadline deadline = soon(); endpoint.acceptor.rejected() < kCrowd + 1 - kPlaces && !deadline.expired();) {
    ASSERT_TRUE(endpoint.acceptor.poll(still).empty());
  }
  EXPECT_EQ(endpoint.acceptor.rejected(), kCrowd + 1 - kPlaces);
  ASSERT_TRUE(endpoint.open(link));
  EXPECT_EQ(endpoint.accepted.size(), 1U);
  EXPECT_EQ(endpoint.acceptor.rejected(), kCrowd + 1 - kPlaces) << "the peer has not had to come again";
}

/// Passes what a rank sends to the endpoint on, and keeps it, as somebody on the network can.
std::string recordFirstMessage(Endpoint& endpoint) {
  Listener between = Listener::bind(kLoopback, {});
  GreetedLink rank({}, between.address(), helloOf(1), {endpoint.first, endpoint.self->self()});
  std::string message;
  std::optional<Listener::Incoming> incoming;
  for (const Deadline deadline = soon(); message.empty() && !deadline.expired();) {
    (void)rank.finishConnect();
    incoming = incoming ? std::move(incoming) : between.accept();
    std::array<char, 4096> bytes{};
    const ssize_t got = incoming ? ::recv(incoming->fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) : -1;
    message.assign(bytes.data(), got > 0 ? static_cast<size_t>(got) : 0);
  }
  return message;
}

std::unique_ptr<SocketLink> say(Endpoint& endpoint, const std::string& bytes) {
  auto link = connectSocket(kLoopback, endpoint.acceptor.address(), soon(), kNoAbort);
  writeAll(*link, {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, soon(), kNoAbort);
  return link;
}

bool isAnswered(const SocketLink& link, int timeout_ms) {
  pollfd ready{link.fd(), POLLIN, 0};
  char byte = 0;
  return ::poll(&ready, 1, timeout_ms) == 1 && ::recv(link.fd(), &byte, 1, MSG_DONTWAIT | MSG_PEEK) == 1;
}

// Wherever it stops, also behind the answer, nobody waits for it longer.
TEST(TlsEndpoint, AHandshakeThatStopsIsDroppedAfterTwoSeconds) {
  Endpoint endpoint;
  const std::string message = recordFirstMessage(endpoint);
  const TimePoint begin = Clock::now();
  std::vector<std::unique_ptr<SocketLink>> stopped;
  for (const size_t nbytes : {size_t{1}, size_t{5}, message.size() / 2, message.size() - 1, message.size()}) {
    stopped.push_back(say(endpoint, message.substr(0, nbytes)));
  }
  const auto all = static_cast<int64_t>(stopped.size());
  for (const Deadline deadline = soon(); !isAnswered(*stopped.back(), 1);) {
    ASSERT_FALSE(deadline.expired());
    ASSERT_TRUE(endpoint.acceptor.poll(begin).empty());
  }
  for (int turn = 0; turn < 20; ++turn) { // the last one that came has been read, so the others have
    ASSERT_TRUE(endpoint.acceptor.poll(begin).empty());
  }
  ASSERT_TRUE(endpoint.acceptor.poll(begin + std::chrono::milliseconds(1999)).empty());
  EXPECT_EQ(endpoint.acceptor.rejected(), 0);
  EXPECT_EQ(endpoint.acceptor.nextDeadline(), begin + std::chrono::seconds(2));
  ASSERT_TRUE(endpoint.acceptor.poll(begin + std::chrono::seconds(2)).empty());
  EXPECT_EQ(endpoint.acceptor.rejected(), all);
  for (const auto& link : stopped) {
    EXPECT_TRUE(waitReadable(link->fd()));
  }
}

// The first time the message is a rank's own, for all that can be known: it gets an answer, and one of the kept places.
TEST(TlsEndpoint, ARecordedFirstMessageIsAnsweredOnce) {
  Endpoint endpoint;
  const std::string message = recordFirstMessage(endpoint);
  ASSERT_FALSE(message.empty());
  const TimePoint still = Clock::now(); // no stranger gets old enough to be dropped
  endpoint.frozen = still;
  const auto once = say(endpoint, message);
  for (const Deadline deadline = soon(); !isAnswered(*once, 1);) {
    ASSERT_FALSE(deadline.expired());
    ASSERT_TRUE(endpoint.acceptor.poll(still).empty());
  }
  for (int64_t repeat = 1; repeat <= 100; ++repeat) {
    const auto again = say(endpoint, message);
    for (const Deadline deadline = soon(); endpoint.acceptor.rejected() < repeat && !deadline.expired();) {
      ASSERT_TRUE(endpoint.acceptor.poll(still).empty());
    }
    ASSERT_EQ(endpoint.acceptor.rejected(), repeat);
    ASSERT_FALSE(isAnswered(*again, 0));
  }
  // None of them has a place, and the same rank can come: it draws another number.
  GreetedLink link({}, endpoint.acceptor.address(), helloOf(1), {endpoint.first, endpoint.self->self()});
  EXPECT_TRUE(endpoint.open(link));
  EXPECT_EQ(endpoint.accepted.size(), 1U);
  EXPECT_EQ(endpoint.acceptor.rejected(), 100);
}

// Somebody between the two was faster than the rank with the rank's own message. The rank sees its connection end, and tries again.
TEST(TlsEndpoint, ARankWhoseFirstMessageWasRepeatedBeforeItCameTriesAgain) {
  Endpoint endpoint;
  const TimePoint still = Clock::now(); // the one who repeats does not get old enough to be dropped
  Listener between = Listener::bind(kLoopback, {});
  GreetedLink rank({}, between.address(), helloOf(1), {endpoint.first, endpoint.self->self()});
  std::vector<std::unique_ptr<SocketLink>> repeats;
  std::vector<std::pair<UniqueFd, std::unique_ptr<SocketLink>>> passed; // both sides of what stands between
  std::array<char, 1 << 14> bytes{};
  for (const Deadline deadline = soon(); endpoint.accepted.empty() && !deadline.expired();) {
    (void)rank.finishConnect();
    if (auto incoming = between.accept()) {
      passed.emplace_back(
          std::move(incoming->fd), connectSocket(kLoopback, endpoint.acceptor.address(), soon(), kNoAbort));
    }
    for (auto& [near, far] : passed) {
      if (const ssize_t got = ::recv(near.get(), bytes.data(), bytes.size(), MSG_DONTWAIT); got > 0) {
        const std::string message(bytes.data(), static_cast<size_t>(got));
        if (repeats.empty()) { // only the first one
          repeats.push_back(say(endpoint, message));
          while (!isAnswered(*repeats.back(), 1)) {
            ASSERT_FALSE(deadline.expired());
            ASSERT_TRUE(endpoint.acceptor.poll(still).empty());
          }
        }
        writeAll(*far, {reinterpret_cast<const std::byte*>(message.data()), message.size()}, soon(), kNoAbort);
      }
      const ssize_t got = ::recv(far->fd(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (got > 0) {
        ASSERT_EQ(::send(near.get(), bytes.data(), static_cast<size_t>(got), MSG_NOSIGNAL), got);
      } else if (got == 0 || errno != EAGAIN) {
        (void)::shutdown(near.get(), SHUT_RDWR);
      }
    }
    for (Accepted& peer : endpoint.acceptor.poll(still)) {
      endpoint.accepted.push_back(std::move(peer));
    }
  }
  ASSERT_EQ(endpoint.accepted.size(), 1U);
  EXPECT_EQ(endpoint.accepted[0].hello.rank, 1);
  EXPECT_EQ(passed.size(), 2U) << "the rank has come twice";
  EXPECT_EQ(endpoint.acceptor.rejected(), 1);
}

TEST(SeenHellos, ForgetsTheOldestOnly) {
  const auto numbered = [](size_t number) {
    ClientRandom random{};
    std::memcpy(random.data(), &number, sizeof number);
    return random;
  };
  SeenHellos seen;
  for (size_t number = 0; number <= SeenHellos::kMost; ++number) {
    ASSERT_TRUE(seen.add(numbered(number)));
  }
  for (size_t number = 1; number <= SeenHellos::kMost; ++number) {
    ASSERT_FALSE(seen.add(numbered(number)));
  }
  EXPECT_TRUE(seen.add(numbered(0)));
}

} // namespace
} // namespace pycomm::testing
