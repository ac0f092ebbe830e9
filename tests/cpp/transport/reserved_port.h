#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>

#include "base/unique_fd.h"

namespace pycomm::testing {

/// A port of loopback that the kernel gives to no program while this lives. It gives a free one to the next program that asks for any, and
/// other test programs open hundreds. A program that names this port may listen there.
class ReservedPort {
 public:
  ReservedPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in self{};
    socklen_t nbytes = sizeof self;
    self.sin_family = AF_INET;
    self.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int on = 1;
    EXPECT_EQ(::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&self), nbytes), 0);
    // After the kernel has chosen: with the option it may choose one that somebody else has reserved so.
    EXPECT_EQ(::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), 0);
    EXPECT_EQ(::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&self), &nbytes), 0);
    number_ = ntohs(self.sin_port);
  }
  [[nodiscard]] uint16_t number() const {
    return number_;
  }

 protected:
  UniqueFd socket_;

 private:
  uint16_t number_ = 0;
};

} // namespace pycomm::testing
