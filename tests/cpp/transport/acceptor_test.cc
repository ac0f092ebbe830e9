#include "transport/net/acceptor.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "base/log.h"
#include "transport/error_matchers.h"
#include "transport/loopback.h"
#include "transport/process.h"
#include "transport/socket_pairs.h"
#include "views.h"

namespace pycomm {
namespace {

using std::chrono::milliseconds;
using testing::elapsedMs;
using testing::errorOf;
using ::testing::HasSubstr;
using testing::kLoopback;
using testing::kNoAbort;
using testing::Process;
using testing::view;
using testing::waitDelivered;

constexpr uint64_t kNonce = 77;
const std::string kOurVersion = std::to_string(FrameHeader::kVersion);

AcceptorConfig config() {
  AcceptorConfig result;
  result.nonce = kNonce;
  result.group = 5;
  result.size = 4;
  return result;
}

Hello helloOf(int rank) {
  Hello hello;
  hello.nonce = kNonce;
  hello.rank = rank;
  hello.size = 4;
  hello.group = 5;
  return hello;
}

/// Runs an acceptor as its owner does: waits on its descriptor until the next deadline, then polls.
class AcceptorServer {
 public:
  AcceptorServer() : acceptor(Listener::bind(kLoopback, {}), config()) {}

  // Serves until `enough` says so or `timeout_ms` have passed; false at the timeout.
  bool serve(const std::function<bool()>& enough, int timeout_ms = 20000) {
    for (const Deadline deadline = Deadline::after(timeout_ms); !enough();) {
      if (deadline.expired()) {
        return false;
      }
      const Deadline next = Deadline::at(std::min(deadline.instant(), acceptor.nextDeadline()));
      pollfd wait{acceptor.fd(), POLLIN, 0};
      (void)::poll(&wait, 1, next.remainingMs(100));
      ++wakes;
      for (Accepted& peer : acceptor.poll(frozen.value_or(Clock::now()))) {
        accepted.push_back(std::move(peer));
      }
    }
    return true;
  }

  [[nodiscard]] std::unique_ptr<SocketLink> dial() const {
    return connectSocket(kLoopback, acceptor.address(), Deadline::after(20000), kNoAbort);
  }
  [[nodiscard]] std::unique_ptr<SocketLink> dial(const std::string& bytes) const {
    auto link = dial();
    writeAll(*link, view(bytes), Deadline::after(20000), kNoAbort);
    return link;
  }

  Acceptor acceptor;
  std::vector<Accepted> accepted;
  std::optional<TimePoint> frozen; ///< the time for the acceptor, which drops any stranger after 2 s
  int64_t wakes = 0;
};

std::string readReply(Link& link, FrameHeader& header) {
  readAll(link, {reinterpret_cast<std::byte*>(&header), sizeof header}, Deadline::after(20000), kNoAbort);
  std::string payload(header.payload_nbytes, '\0');
  readAll(link, {reinterpret_cast<std::byte*>(payload.data()), payload.size()}, Deadline::after(20000), kNoAbort);
  return payload;
}

bool isClosed(Link& link) {
  std::byte byte{};
  try {
    return link.tryRead({&byte, 1}).closed;
  } catch (const Error&) {
    return true; // a reset: the other side closed over unread bytes
  }
}

TEST(Acceptor, IntroducesAPeerAndLeavesItsNextBytesAlone) {
  AcceptorServer server;
  EXPECT_EQ(server.acceptor.nextDeadline(), TimePoint::max());
  EXPECT_TRUE(server.acceptor.poll(Clock::now()).empty());
  const auto link = server.dial(encodeHello(helloOf(2)) + "next");
  ASSERT_TRUE(server.serve([&] { return !server.accepted.empty(); }));
  EXPECT_EQ(server.accepted[0].hello.rank, 2);
  std::string next(4, '\0');
  readAll(
      *server.accepted[0].link,
      {reinterpret_cast<std::byte*>(next.data()), next.size()},
      Deadline::after(5000),
      kNoAbort);
  EXPECT_EQ(next, "next");
  EXPECT_EQ(server.acceptor.rejected(), 0);
  // Its descriptor is quiet again, though the link is still open.
  pollfd wait{server.acceptor.fd(), POLLIN, 0};
  writeAll(*link, view("more"), Deadline::after(20000), kNoAbort);
  EXPECT_EQ(::poll(&wait, 1, 50), 0);
}

TEST(Acceptor, WaitsForAHelloInPieces) {
  AcceptorServer server;
  server.frozen = Clock::now();
  const std::string hello = encodeHello(helloOf(1));
  const auto link = server.dial(hello.substr(0, 1));
  for (size_t at = 1; at < hello.size(); ++at) {
    const int64_t before = server.wakes;
    writeAll(*link, view(hello.substr(at, 1)), Deadline::after(20000), kNoAbort);
    ASSERT_TRUE(server.serve([&] { return server.wakes > before; }));
    ASSERT_TRUE(server.accepted.empty() || at + 1 == hello.size());
  }
  EXPECT_TRUE(server.serve([&] { return server.accepted.size() == 1; }));
}

TEST(Acceptor, DropsGarbageWithoutAnAnswer) {
  AcceptorServer server;
  const auto link = server.dial("GET / HTTP/1.1\r\nHost: here\r\n\r\n" + std::string(5000, 'x'));
  const TimePoint begin = Clock::now();
  ASSERT_TRUE(server.serve([&] { return server.acceptor.rejected() == 1; }));
  EXPECT_WITHIN_MS(elapsedMs(begin), 2000);
  std::byte byte{};
  const ErrorRecord record = errorOf([&] { readAll(*link, {&byte, 1}, Deadline::after(20000), kNoAbort); });
  EXPECT_EQ(record.code, ErrorCode::ConnectionReset);
  EXPECT_TRUE(server.accepted.empty());
}

TEST(Acceptor, TellsAnotherVersionWhy) {
  AcceptorServer server;
  std::string hello = encodeHello(helloOf(1));
  hello[2] = 9;
  const auto link = server.dial(hello + std::string(200, 'z')); // a longer hello than ours
  ASSERT_TRUE(server.serve([&] { return server.acceptor.rejected() == 1; }));
  FrameHeader header;
  const auto reason = decodeHelloReply(view(readReply(*link, header)), 4);
  EXPECT_EQ(header.type, FrameType::HelloReply);
  ASSERT_TRUE(reason);
  EXPECT_EQ(reason->code, ErrorCode::VersionMismatch);
  EXPECT_THAT(
      reason->summary,
      HasSubstr("the connecting rank speaks pycomm wire version 9 and the listening rank version " + kOurVersion));
  EXPECT_TRUE(server.serve([&] { return isClosed(*link); }));
}

// The Hello of rank 1 of 2 as the first wire version wrote it, byte by byte; the reply in the layout that version could read.
TEST(Acceptor, TellsAPeerOfTheFirstVersionWhy) {
  AcceptorServer server;
  std::string hello(96, '\0');
  hello.replace(0, 8, std::string("cy\x01\x01\x20\0\0\0", 8)); // magic, version, type, 32 bytes of payload
  hello[24] = 5; // group
  hello[64] = 77; // nonce
  hello[72] = 1; // rank
  hello[76] = 2; // size
  const auto link = server.dial(hello);
  ASSERT_TRUE(server.serve([&] { return server.acceptor.rejected() == 1; }));
  std::string header(64, '\0');
  readAll(*link, {reinterpret_cast<std::byte*>(header.data()), header.size()}, Deadline::after(20000), kNoAbort);
  EXPECT_EQ(header.substr(0, 4), std::string("cy") + static_cast<char>(FrameHeader::kVersion) + '\x02') << "a reply";
  const auto nbytes = static_cast<size_t>(static_cast<uint8_t>(header[4])) + 256U * static_cast<uint8_t>(header[5]);
  EXPECT_EQ(header.substr(6, 2), std::string(2, '\0'));
  std::string reason(nbytes, '\0');
  readAll(*link, {reinterpret_cast<std::byte*>(reason.data()), reason.size()}, Deadline::after(20000), kNoAbort);
  EXPECT_THAT(
      reason,
      HasSubstr("the connecting rank speaks pycomm wire version 1 and the listening rank version " + kOurVersion));
  EXPECT_EQ(decodeHelloReply(view(reason), 4)->code, ErrorCode::VersionMismatch);
  EXPECT_TRUE(server.accepted.empty());
}

TEST(Acceptor, TellsAnotherJobWhy) {
  AcceptorServer server;
  Hello other_job = helloOf(1);
  other_job.nonce = kNonce + 1;
  Hello other_group = helloOf(1);
  other_group.group = 6;
  Hello other_size = helloOf(1);
  other_size.size = 9;
  int64_t count = 0;
  for (const Hello& hello : {other_job, other_group, other_size}) {
    const auto link = server.dial(encodeHello(hello));
    ++count;
    ASSERT_TRUE(server.serve([&] { return server.acceptor.rejected() == count; }));
    FrameHeader header;
    const auto reason = decodeHelloReply(view(readReply(*link, header)), 4);
    ASSERT_TRUE(reason);
    EXPECT_EQ(reason->code, ErrorCode::ConfigMismatch);
    EXPECT_THAT(reason->summary, HasSubstr(hello.size == 9 ? "4 and 9" : "another pycomm job"));
  }
  EXPECT_TRUE(server.accepted.empty());
}

TEST(Acceptor, GivesStrangersTwoSeconds) {
  AcceptorServer server;
  const auto silent = server.dial();
  const auto half = server.dial(encodeHello(helloOf(1)).substr(0, 70));
  ASSERT_TRUE(server.serve([&] { return server.acceptor.nextDeadline() != TimePoint::max(); }));
  const TimePoint due = server.acceptor.nextDeadline();
  const TimePoint begin = Clock::now();
  server.wakes = 0;
  EXPECT_LE(due, Clock::now() + milliseconds(2000));
  ASSERT_TRUE(server.serve([&] { return server.acceptor.rejected() == 2; }));
  EXPECT_GE(Clock::now(), due);
  EXPECT_EQ(server.acceptor.nextDeadline(), TimePoint::max());
  EXPECT_TRUE(isClosed(*silent));
  EXPECT_TRUE(isClosed(*half));
  EXPECT_LT(server.wakes, 20 + elapsedMs(begin) / 100); // it slept in between, for 100 ms at a time
}

TEST(Acceptor, DoesNotLetOneTrickleForever) {
  // One byte now and then must not renew the two seconds. Time is passed in, so nothing has to be waited for.
  AcceptorServer server;
  const auto link = server.dial();
  ASSERT_TRUE(server.serve([&] { return server.acceptor.nextDeadline() != TimePoint::max(); }));
  const std::string hello = encodeHello(helloOf(1));
  const TimePoint arrived = server.acceptor.nextDeadline() - milliseconds(2000);
  for (int i = 0; i < 19; ++i) {
    writeAll(*link, view(hello.substr(static_cast<size_t>(i), 1)), Deadline::after(20000), kNoAbort);
    EXPECT_TRUE(server.acceptor.poll(arrived + milliseconds(100 * (i + 1))).empty());
    ASSERT_EQ(server.acceptor.rejected(), 0) << i;
  }
  EXPECT_TRUE(server.acceptor.poll(arrived + milliseconds(2000)).empty());
  EXPECT_EQ(server.acceptor.rejected(), 1);
}

TEST(Acceptor, KeepsNoStrangerPastItsBounds) {
  // A refused peer that goes on talking is cut off after 512 bytes.
  AcceptorServer server;
  server.frozen = Clock::now(); // not because its time is over
  std::string hello = encodeHello(helloOf(1));
  hello[2] = 9;
  const auto link = server.dial(hello + std::string(100000, 'z'));
  ASSERT_TRUE(server.serve([&] { return server.acceptor.rejected() == 1; }));
  ASSERT_TRUE(server.serve([&] { return server.acceptor.nextDeadline() == TimePoint::max(); }));
}

TEST(Acceptor, LetsAPeerThroughACrowdOfSilentConnections) {
  AcceptorServer server;
  std::vector<std::unique_ptr<SocketLink>> crowd;
  for (int i = 0; i < 200; ++i) {
    crowd.push_back(server.dial());
  }
  const auto peer = server.dial(encodeHello(helloOf(3)));
  const TimePoint begin = Clock::now();
  ASSERT_TRUE(server.serve([&] { return !server.accepted.empty(); }, 10000));
  EXPECT_EQ(server.accepted[0].hello.rank, 3);
  EXPECT_WITHIN_MS(elapsedMs(begin), 1000); // nobody waits for a place
}

// As many as a host can have ready before anybody is served, each of which says a little and no more.
TEST(Acceptor, LetsAPeerThroughAThousandSlowConnections) {
  AcceptorServer server;
  std::vector<std::unique_ptr<SocketLink>> crowd;
  for (int i = 0; i < 1000; ++i) {
    crowd.push_back(server.dial(encodeHello(helloOf(1)).substr(0, static_cast<size_t>(i % 95 + 1))));
  }
  const auto peer = server.dial(encodeHello(helloOf(3)));
  const TimePoint begin = Clock::now();
  ASSERT_TRUE(server.serve([&] { return !server.accepted.empty(); }, 10000));
  EXPECT_EQ(server.accepted[0].hello.rank, 3);
  EXPECT_WITHIN_MS(elapsedMs(begin), 1000);
  EXPECT_GE(server.acceptor.rejected(), 1000 - 64) << "the oldest give way, and 64 are kept";
  EXPECT_LE(server.acceptor.rejected(), 1000);
}

// One that has said everything by the time that its place is asked for is a peer.
TEST(Acceptor, SendsNobodyAwayWhoHasSaidEverything) {
  AcceptorServer server;
  server.frozen = Clock::now();
  const std::string hello = encodeHello(helloOf(2));
  const auto slow = server.dial(hello.substr(0, 50));
  ASSERT_TRUE(server.serve([&] { return server.acceptor.nextDeadline() != TimePoint::max(); }));
  std::vector<std::unique_ptr<SocketLink>> crowd;
  for (int i = 0; i < 64; ++i) {
    crowd.push_back(server.dial("c"));
  }
  writeAll(*slow, view(hello.substr(50)), Deadline::after(20000), kNoAbort);
  ASSERT_TRUE(waitDelivered(slow->fd()));
  ASSERT_TRUE(server.serve([&] { return !server.accepted.empty(); }));
  EXPECT_EQ(server.accepted[0].hello.rank, 2);
}

TEST(Acceptor, RepliesToAPeerAndTellsAStrangerNothingOfTheGroup) {
  AcceptorServer server;
  const auto peer = server.dial(encodeHello(helloOf(2)));
  ASSERT_TRUE(server.serve([&] { return !server.accepted.empty(); }));
  FrameHeader header;
  EXPECT_EQ(readReply(*peer, header), "");
  EXPECT_EQ(header.type, FrameType::HelloReply);
  EXPECT_EQ(header.group, 5U);

  Hello other = helloOf(2);
  other.nonce = 0;
  const auto stranger = server.dial(encodeHello(other));
  ASSERT_TRUE(server.serve([&] { return server.acceptor.rejected() == 1; }));
  const std::string payload = readReply(*stranger, header);
  EXPECT_EQ(header.group, 0U);
  EXPECT_EQ(decodeHelloReply(view(payload), 4).value().host, "");
  EXPECT_EQ(payload.find(localHostName()), std::string::npos);
}

// A rank number is an index; nobody else has this process's own, and an epoch is of one group only.
TEST(Acceptor, RefusesItsOwnRankAndAnotherEpoch) {
  AcceptorConfig own = config();
  own.rank = 2;
  Acceptor acceptor(Listener::bind(kLoopback, {}), own);
  Hello of_epoch = helloOf(1);
  of_epoch.epoch = 1;
  int64_t refused = 0;
  for (const Hello& hello : {helloOf(2), of_epoch}) {
    const auto link = connectSocket(kLoopback, acceptor.address(), Deadline::after(20000), kNoAbort);
    writeAll(*link, view(encodeHello(hello)), Deadline::after(20000), kNoAbort);
    ++refused;
    for (const Deadline deadline = Deadline::after(5000); acceptor.rejected() < refused;) {
      ASSERT_FALSE(deadline.expired());
      EXPECT_TRUE(acceptor.poll(Clock::now()).empty());
    }
  }
}

TEST(Acceptor, ServesPeersDuringAStormOfGarbage) {
  AcceptorServer server;
  std::atomic<bool> stop{false};
  std::thread storm([&] {
    const std::vector<std::string> junk = {
        "", "x", std::string(3, '\0'), std::string(600, 'A'), encodeHello(helloOf(1)).substr(0, 64), "SSH-2.0-x\r\n"};
    for (size_t i = 0; !stop && i < 3000; ++i) {
      try {
        auto link = server.dial();
        const ConstBufferView bytes = view(junk[i % junk.size()]);
        (void)link->tryWrite(&bytes, 1);
      } catch (const Error&) {
        // the acceptor was faster
      }
    }
  });
  std::vector<std::unique_ptr<SocketLink>> peers;
  for (int rank = 0; rank < 4; ++rank) {
    peers.push_back(server.dial(encodeHello(helloOf(rank))));
    EXPECT_TRUE(server.serve([&] { return server.accepted.size() == peers.size(); })) << rank;
  }
  stop = true;
  storm.join();
  EXPECT_EQ(server.accepted.size(), 4U);
}

std::atomic<int> g_lines{0};

TEST(Acceptor, LogsFewLinesForManyStrangers) {
  g_lines = 0;
  const TimePoint begin = Clock::now();
  setLogSink([](LogLevel, const char*) { ++g_lines; }, LogLevel::Warn);
  {
    AcceptorServer server;
    for (int i = 1; i <= 50; ++i) {
      const auto link = server.dial("garbage");
      EXPECT_TRUE(server.serve([&] { return server.acceptor.rejected() == i; }));
    }
  }
  setLogSink(nullptr, LogLevel::Off);
  EXPECT_GE(g_lines, 1);
  EXPECT_LE(g_lines, 2 + elapsedMs(begin) / 10000) << "one in ten seconds";
}

TEST(Acceptor, PausesWhenTheProcessHasNoFilesLeft) {
  // UBSan opens a pipe when it meets a dynamic type for the first time, and cannot without files: let it meet it now.
  const std::exception& early = Error(ErrorCode::Internal, "early");
  EXPECT_STRNE(early.what(), "");
  // In a process of its own: the limit must not hit anything else.
  EXPECT_TRUE(Process([] {
                AcceptorServer server;
                const auto link = server.dial(encodeHello(helloOf(1)));
                const auto late = server.dial(encodeHello(helloOf(2)));
                rlimit limit{64, 64};
                ::setrlimit(RLIMIT_NOFILE, &limit);
                std::vector<UniqueFd> hoard;
                while (hoard.empty() || hoard.back()) {
                  hoard.emplace_back(::fcntl(link->fd(), F_DUPFD_CLOEXEC, 0));
                }
                // The reserve lets garbage be sent away, and one peer come in; the next finds no room.
                const auto junk = ::socket(AF_INET, SOCK_STREAM, 0) < 0; // none left, indeed
                const bool first = server.serve([&] { return server.accepted.size() == 1; }, 5000);
                const TimePoint begin = Clock::now();
                server.wakes = 0;
                const bool waited = !server.serve([&] { return server.accepted.size() > 1; }, 500);
                const bool calm = server.wakes < 30 && elapsedMs(begin) >= 500;
                const bool told = server.acceptor.trouble()->code == ErrorCode::TooManyFiles;
                hoard.clear();
                const bool served = server.serve([&] { return server.accepted.size() > 1; });
                return junk && first && waited && calm && told && served && !server.acceptor.trouble();
              }).join());
}

TEST(Acceptor, SendsGarbageAwayWithoutAFileLeft) {
  const std::exception& early = Error(ErrorCode::Internal, "early"); // see above
  EXPECT_STRNE(early.what(), "");
  EXPECT_TRUE(Process([] {
                AcceptorServer server;
                std::vector<std::unique_ptr<SocketLink>> junk;
                for (int i = 0; i < 20; ++i) {
                  junk.push_back(server.dial("garbage"));
                }
                rlimit limit{64, 64};
                ::setrlimit(RLIMIT_NOFILE, &limit);
                std::vector<UniqueFd> hoard;
                while (hoard.empty() || hoard.back()) {
                  hoard.emplace_back(::fcntl(junk[0]->fd(), F_DUPFD_CLOEXEC, 0));
                }
                return server.serve([&] { return server.acceptor.rejected() == 20; }) && !server.acceptor.trouble();
              }).join());
}

std::atomic<int> g_warnings{0};

TEST(Acceptor, WarnsOfNobodyWhoOnlyLeavesAgain) {
  g_warnings = 0;
  setLogSink([](LogLevel level, const char*) { g_warnings += level == LogLevel::Warn ? 1 : 0; }, LogLevel::Trace);
  {
    AcceptorServer server;
    for (int i = 1; i <= 3; ++i) {
      (void)server.dial(encodeHello(helloOf(1)).substr(0, i == 2 ? 40 : 0));
      EXPECT_TRUE(server.serve([&] { return server.acceptor.rejected() == i; }));
    }
    EXPECT_EQ(g_warnings, 0);
    const auto link = server.dial("garbage"); // and they do not silence this
    EXPECT_TRUE(server.serve([&] { return server.acceptor.rejected() == 4; }));
    EXPECT_EQ(g_warnings, 1);
  }
  setLogSink(nullptr, LogLevel::Off);
}

TEST(Acceptor, CanBeNestedInAnotherEpollSet) {
  AcceptorServer server;
  const UniqueFd outer(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  ASSERT_EQ(::epoll_ctl(outer.get(), EPOLL_CTL_ADD, server.acceptor.fd(), &event), 0);
  EXPECT_EQ(::epoll_wait(outer.get(), &event, 1, 0), 0);
  const auto link = server.dial(encodeHello(helloOf(0)));
  EXPECT_EQ(::epoll_wait(outer.get(), &event, 1, 5000), 1);
  EXPECT_TRUE(server.serve([&] { return server.accepted.size() == 1; }));
  EXPECT_EQ(::epoll_wait(outer.get(), &event, 1, 0), 0);
}

// As over TCP: a Hello of another job is refused, with the reason. Which nonce a Unix socket's acceptor has: group_secret_test.cc.
TEST(Acceptor, TakesAPeerFromAUnixSocket) {
  Acceptor acceptor(Listener::bindUnix(randomUnixName()), config());
  const auto dial = [&](uint64_t nonce) {
    Hello hello = helloOf(2);
    hello.nonce = nonce;
    auto link = connectSocket({}, acceptor.address(), Deadline::after(20000), kNoAbort);
    writeAll(*link, view(encodeHello(hello)), Deadline::after(20000), kNoAbort);
    return link;
  };
  const auto stranger = dial(kNonce + 1);
  const auto peer = dial(kNonce);
  std::vector<Accepted> accepted = acceptor.poll(Clock::now());
  ASSERT_EQ(accepted.size(), 1U);
  EXPECT_EQ(accepted[0].hello.rank, 2);
  EXPECT_EQ(acceptor.rejected(), 1);
  FrameHeader header;
  EXPECT_THAT(readReply(*stranger, header), HasSubstr("another pycomm job or group"));
}

// A process with many groups has many acceptors; strangers may not take its descriptors all the same.
TEST(Acceptor, AllOfAProcessShareTheSlots) {
  auto first = std::make_unique<AcceptorServer>();
  AcceptorServer second;
  first->frozen = second.frozen = Clock::now(); // nobody is sent away because its time is over
  std::vector<std::unique_ptr<SocketLink>> crowd;
  const auto come = [&](AcceptorServer& server, int count, int64_t sent_away) {
    for (int i = 0; i < count; ++i) {
      crowd.push_back(server.dial("c"));
    }
    (void)server.serve([&] { return server.acceptor.rejected() >= sent_away; }, 20000);
    (void)server.serve([&] { return server.acceptor.rejected() > sent_away; }, 300);
    EXPECT_EQ(server.acceptor.rejected(), sent_away);
  };
  come(*first, 50, 0);
  come(second, 20, 6); // 14 are left
  come(*first, 3, 3);
  first = nullptr;
  come(second, 40, 6); // its slots are free again
}

TEST(Acceptor, HasFourSlotsWhateverTheOthersHave) {
  AcceptorServer greedy;
  AcceptorServer late;
  greedy.frozen = late.frozen = Clock::now();
  std::vector<std::unique_ptr<SocketLink>> crowd;
  for (int i = 0; i < 64; ++i) {
    crowd.push_back(greedy.dial("c"));
  }
  (void)greedy.serve([] { return false; }, 200);
  EXPECT_EQ(greedy.acceptor.rejected(), 0);
  for (int i = 0; i < 6; ++i) {
    crowd.push_back(late.dial("c"));
  }
  (void)late.serve([&] { return late.acceptor.rejected() >= 2; }, 20000);
  (void)late.serve([] { return false; }, 200);
  EXPECT_EQ(late.acceptor.rejected(), 2);
}

} // namespace
} // namespace pycomm
