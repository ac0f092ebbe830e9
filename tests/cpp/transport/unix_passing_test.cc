#include "transport/memory/unix_passing.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>

namespace pycomm::testing {
namespace {

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
