#include "transport/net/listener.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <vector>

#include "transport/process.h"
#include "transport/socket_pairs.h"

namespace pycomm {
namespace {

using testing::elapsedMs;
using testing::errorOf;
using ::testing::HasSubstr;
using testing::kLoopback;
using testing::kNoAbort;
using testing::Process;
using testing::waitReadable;

TEST(Listener, AcceptsOnExactlyItsAddress) {
  Listener listener = Listener::bind(kLoopback, {});
  EXPECT_TRUE(listener.address().sameIp(kLoopback));
  EXPECT_NE(listener.address().port(), 0);
  EXPECT_FALSE(listener.accept());
  const auto link = startConnect(kLoopback, listener.address());
  ASSERT_TRUE(waitReadable(listener.fd()));
  const auto incoming = listener.accept();
  ASSERT_TRUE(incoming);
  EXPECT_TRUE(incoming->remote.sameIp(kLoopback));
  EXPECT_NE(::fcntl(incoming->fd.get(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(::fcntl(incoming->fd.get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_NE(::fcntl(listener.fd(), F_GETFD) & FD_CLOEXEC, 0);
  // Another address of the same host is not listened on.
  const auto elsewhere = SocketAddress::parse("127.0.0.2", listener.address().port());
  EXPECT_EQ(
      errorOf([&] { (void)connectSocket({}, elsewhere, Deadline::after(0), AbortToken()); }).code,
      ErrorCode::ConnectFailed);
}

// The kernel keeps a client to itself until the client sends bytes; 2 s later it would give it to this process.
TEST(Listener, LeavesSilentClientsToTheKernel) {
  bool in_time = false;
  for (int tries = 0; tries < 10 && !in_time; ++tries) { // a busy machine may stop this thread for that long
    Listener listener = Listener::bind(kLoopback, {});
    listener.deferSilent();
    const TimePoint begin = Clock::now();
    std::vector<std::unique_ptr<SocketLink>> silent;
    for (int i = 0; i < 200; ++i) {
      silent.push_back(connectSocket(kLoopback, listener.address(), Deadline::after(20000), kNoAbort));
    }
    const auto speaks = connectSocket(kLoopback, listener.address(), Deadline::after(20000), kNoAbort);
    const std::byte byte{7};
    writeAll(*speaks, {&byte, 1}, Deadline::after(20000), kNoAbort);
    ASSERT_TRUE(waitReadable(listener.fd()));
    const std::optional<Listener::Incoming> first = listener.accept();
    const std::optional<Listener::Incoming> second = listener.accept();
    in_time = elapsedMs(begin) < 900; // the kernel's clock for this ticks once a second
    if (in_time) {
      ASSERT_TRUE(first);
      EXPECT_EQ(first->remote, speaks->local()) << "the first to be seen is the one that speaks";
      EXPECT_FALSE(second);
    }
  }
  EXPECT_TRUE(in_time) << "the machine is too busy to see this";
}

TEST(Listener, WorksOverIPv6) {
  const SocketAddress loopback = SocketAddress::parse("::1", 0);
  Listener listener;
  try {
    listener = Listener::bind(loopback, {});
  } catch (const Error& error) {
    GTEST_SKIP() << "this host has no IPv6 loopback: " << error.what();
  }
  const auto link = connectSocket(loopback, listener.address(), Deadline::after(5000), AbortToken());
  EXPECT_THAT(link->describe(), HasSubstr("[::1]:"));
  ASSERT_TRUE(waitReadable(listener.fd()));
  EXPECT_TRUE(listener.accept()->remote.isLoopback());
}

TEST(Listener, TakesTheNextPortOfItsRangeAndSaysWhenNoneIsLeft) {
  // Which ports are free here is not known beforehand: find two in a row by trying.
  for (uint16_t first = 29600; first < 30600; first = static_cast<uint16_t>(first + 2)) {
    const PortRange range{first, static_cast<uint16_t>(first + 1)};
    try {
      const Listener one = Listener::bind(kLoopback, range);
      const Listener two = Listener::bind(kLoopback, range);
      EXPECT_EQ(one.address().port(), range.first);
      EXPECT_EQ(two.address().port(), range.last);
      const ErrorRecord record = errorOf([&] { (void)Listener::bind(kLoopback, range); });
      EXPECT_EQ(record.code, ErrorCode::PortsExhausted);
      EXPECT_THAT(record.summary, HasSubstr(range.text()));
      EXPECT_THAT(record.summary, HasSubstr("127.0.0.1"));
      EXPECT_THAT(record.cause, HasSubstr("EADDRINUSE"));
      EXPECT_THAT(record.cause, HasSubstr("2 ports"));
      return;
    } catch (const Error&) {
      continue;
    }
  }
  GTEST_SKIP() << "no two free ports in a row between 29600 and 30600";
}

TEST(Listener, TakesItsPortAgainAfterConnectionsWereClosed) {
  const uint16_t port = Listener::bind(kLoopback, {}).address().port(); // a free one
  Listener listener = Listener::bind(kLoopback, {port, port});
  auto link = startConnect(kLoopback, listener.address());
  ASSERT_TRUE(waitReadable(listener.fd()));
  auto incoming = listener.accept();
  incoming->fd.reset(); // the listening side closes first: its end goes to TIME_WAIT
  link.reset();
  listener = Listener();
  EXPECT_EQ(Listener::bind(kLoopback, {port, port}).address().port(), port);
}

TEST(Listener, RefusesAddressesThatAreTooWideOrNotHere) {
  for (const char* ip : {"0.0.0.0", "::"}) {
    EXPECT_EQ(errorOf([&] { (void)Listener::bind(SocketAddress::parse(ip, 0), {}); }).code, ErrorCode::InvalidArgument);
  }
  const ErrorRecord record = errorOf([] { (void)Listener::bind(SocketAddress::parse("203.0.113.9", 0), {}); });
  EXPECT_EQ(record.code, ErrorCode::NoInterface);
  EXPECT_THAT(record.summary, HasSubstr("203.0.113.9"));
  for (const PortRange& range : {PortRange{5, 4}, PortRange{0, 9}}) {
    EXPECT_EQ(errorOf([&] { (void)Listener::bind(kLoopback, range); }).code, ErrorCode::InvalidArgument);
  }
}

TEST(Listener, SaysWhichLimitOnFilesWasReached) {
  // In a process of its own: the limit must not hit anything else.
  EXPECT_TRUE(Process([] {
                Listener listener = Listener::bind(kLoopback, {});
                const auto link = startConnect(kLoopback, listener.address());
                if (!waitReadable(listener.fd())) {
                  return false;
                }
                rlimit limit{64, 64};
                ::setrlimit(RLIMIT_NOFILE, &limit);
                std::vector<UniqueFd> hoard;
                while (hoard.empty() || hoard.back()) {
                  hoard.emplace_back(::fcntl(listener.fd(), F_DUPFD_CLOEXEC, 0));
                }
                const ErrorRecord record = errorOf([&] { (void)listener.accept(); });
                const bool named = record.code == ErrorCode::TooManyFiles &&
                    record.summary.find("no more than 64 files") != std::string::npos;
                hoard.clear();
                return named && listener.accept().has_value(); // the connection has waited
              }).join());
}

// ---- Unix sockets

bool dials(const SocketAddress& address) {
  return connectSocket({}, address, Deadline::after(5000), kNoAbort) != nullptr;
}

TEST(Listener, AcceptsProcessesOfThisUserOnAUnixSocket) {
  Listener listener = Listener::bindUnix(randomUnixName());
  listener.deferSilent();
  EXPECT_FALSE(listener.accept());
  Process peer([&] { return dials(listener.address()); });
  ASSERT_TRUE(waitReadable(listener.fd()));
  const auto incoming = listener.accept();
  ASSERT_TRUE(incoming);
  EXPECT_EQ(incoming->remote.text(), "unix");
  EXPECT_NE(::fcntl(incoming->fd.get(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(::fcntl(incoming->fd.get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_TRUE(peer.join());
  // Its name is taken while it lives, and no longer.
  const std::string text = listener.address().text();
  const std::string name = text.substr(text.rfind('/') + 1);
  EXPECT_EQ(errorOf([&] { (void)Listener::bindUnix(name); }).code, ErrorCode::SystemError);
  listener = Listener();
  EXPECT_NO_THROW((void)Listener::bindUnix(name));
}

TEST(Listener, LetsNoOtherUserOntoAUnixSocket) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root, to become others";
  }
  Listener listener = Listener::bindUnix(randomUnixName());
  // pycomm checks the user on the connecting side, too, and would stop a stranger there. So this process connects without pycomm.
  Process other([&] {
    const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    char byte = 0;
    return ::setresuid(4321, 4321, 4321) == 0 &&
        ::connect(fd.get(), listener.address().raw(), listener.address().rawLength()) == 0 &&
        ::read(fd.get(), &byte, 1) == 0; // dropped
  });
  ASSERT_TRUE(waitReadable(listener.fd()));
  EXPECT_FALSE(listener.accept());
  EXPECT_TRUE(other.join());
  Process looks([&] {
    return ::setresuid(4321, 4321, 4321) == 0 &&
        errorOf([&] { (void)startConnect({}, listener.address()); }).cause.rfind("EACCES", 0) == 0;
  });
  EXPECT_TRUE(looks.join());
}

} // namespace
} // namespace pycomm
