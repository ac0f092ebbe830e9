#include "transport/net/unix_peer.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <utility>

#include "base/unique_fd.h"
#include "transport/net/address.h"
#include "transport/process.h"

namespace pycomm::testing {
namespace {

// ---- whose it is

const std::string kName = "same-user-test";

UniqueFd listenHere() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const SocketAddress address = SocketAddress::unixSocket(kName + std::to_string(::getppid()));
  const bool listens = ::bind(socket.get(), address.raw(), address.rawLength()) == 0 && ::listen(socket.get(), 8) == 0;
  return listens ? std::move(socket) : UniqueFd();
}

// A process that connects as user `uid` of the host, and stays until the other end hangs up.
bool connectAs(uid_t uid, SharedFlag& listens, SharedFlag& connected) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const SocketAddress address = SocketAddress::unixSocket(kName + std::to_string(::getppid()));
  char byte = 0;
  if (!listens.wait() || ::setresuid(uid, uid, uid) != 0 ||
      ::connect(socket.get(), address.raw(), address.rawLength()) != 0) {
    return false;
  }
  connected.raise();
  return ::read(socket.get(), &byte, 1) == 0;
}

// What sameUser() says of a client that runs as `client`, in a process that `become` has changed; -1: it could not be tried.
int judged(uid_t client, const std::function<bool()>& become) {
  SharedFlag listens;
  SharedFlag connected;
  SharedFlag verdict; // 1 + what it said
  Process server([&] {
    if (!become()) {
      return false;
    }
    const UniqueFd endpoint = listenHere();
    listens.raise();
    const UniqueFd guest(endpoint ? ::accept4(endpoint.get(), nullptr, nullptr, SOCK_CLOEXEC) : -1);
    if (!guest) {
      return false;
    }
    verdict.raise(sameUser(guest.get()) ? 2 : 1);
    return true;
  });
  Process guest([&] { return connectAs(client, listens, connected); });
  const bool served = server.join();
  guest.kill();
  return served ? static_cast<int>(verdict.value()) - 1 : -1;
}

bool write(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text << std::flush;
  return file.good();
}

// A user namespace as a rootless container has it, in which this process is `inside`, and the host's user 1234.
bool enterUserNamespace(uid_t inside) {
  SharedFlag entered;
  SharedFlag mapped;
  const pid_t self = ::getpid();
  Process mapper([&] { // a process of the parent's namespace must write the map
    const std::string folder = "/proc/" + std::to_string(self) + "/";
    const bool good =
        entered.wait() && write(folder + "uid_map", std::to_string(inside) + " 1234 1\n") && ::kill(self, 0) == 0;
    mapped.raise(good ? 2 : 1);
    return good;
  });
  if (::unshare(CLONE_NEWUSER) != 0) {
    return false;
  }
  entered.raise();
  return mapped.wait() && mapped.value() == 2 && ::setresuid(inside, inside, inside) == 0 && ::geteuid() == inside;
}

constexpr uid_t kOverflow = 65534;

TEST(SameUser, IsTheOneOfTheProcessAndNoOther) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root, to become others";
  }
  const auto become = [](uid_t uid) { return [uid] { return ::setresuid(uid, uid, uid) == 0; }; };
  EXPECT_EQ(judged(0, [] { return true; }), 1);
  EXPECT_EQ(judged(4321, [] { return true; }), 0);
  EXPECT_EQ(judged(4321, become(4321)), 1);
  EXPECT_EQ(judged(4321, become(1234)), 0);
  // On a host all users have numbers, "nobody" too.
  EXPECT_EQ(judged(kOverflow, become(kOverflow)), 1);
}

TEST(SameUser, IsNobodyForWhoRunsAsTheOverflowUserOfANamespace) {
  if (::geteuid() != 0 || !Process([] { return enterUserNamespace(1000); }).join()) {
    GTEST_SKIP() << "user namespaces cannot be made here";
  }
  const auto become = [](uid_t inside) { return [inside] { return enterUserNamespace(inside); }; };
  EXPECT_EQ(judged(1234, become(1000)), 1);
  EXPECT_EQ(judged(4321, become(1000)), 0);
  // The kernel calls both of these 65534.
  EXPECT_EQ(judged(4321, become(kOverflow)), 0);
  EXPECT_EQ(judged(1234, become(kOverflow)), 0);
}

// ---- messages with a descriptor

std::array<UniqueFd, 2> socketPair() {
  std::array<int, 2> fds{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds.data()), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

int openFiles() {
  int count = 0;
  DIR* const folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) {
    ++count;
  }
  ::closedir(folder);
  return count;
}

TEST(UnixPassing, TooLongAMessageIsNoMessage) {
  const auto sockets = socketPair();
  ASSERT_TRUE(passMessage(sockets[0].get(), "12345678", 8, -1));
  char four[4];
  UniqueFd none;
  EXPECT_EQ(takeMessage(sockets[1].get(), four, sizeof four, none), -1);
  EXPECT_EQ(errno, EMSGSIZE);
  EXPECT_EQ(takeMessage(sockets[1].get(), four, sizeof four, none), -1);
  EXPECT_EQ(errno, EAGAIN);
}

// A message with `count` descriptors, which pycomm never sends.
bool passMany(int socket, int count) {
  char text[] = "many";
  iovec part{text, sizeof text};
  std::array<int, 8> fds{};
  fds.fill(socket);
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof fds)> control{};
  const size_t nbytes = static_cast<size_t>(count) * sizeof(int);
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = CMSG_SPACE(nbytes);
  cmsghdr* const rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(nbytes);
  std::memcpy(CMSG_DATA(rights), fds.data(), nbytes);
  return ::sendmsg(socket, &header, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof text);
}

TEST(UnixPassing, FurtherDescriptorsStayNowhere) {
  const auto sockets = socketPair();
  const int before = openFiles();
  for (int count = 1; count <= 8; ++count) {
    ASSERT_TRUE(passMany(sockets[0].get(), count));
    char text[8];
    UniqueFd fd;
    EXPECT_EQ(takeMessage(sockets[1].get(), text, sizeof text, fd), 5) << count;
    EXPECT_TRUE(fd) << count;
    fd.reset();
    EXPECT_EQ(openFiles(), before) << "left open of a message with " << count;
  }
}

} // namespace
} // namespace pycomm::testing
