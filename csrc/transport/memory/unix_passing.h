#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <string>

#include "base/unique_fd.h"

namespace pycomm {

/// Upper bound of the length of pycomm's Unix socket names.
inline constexpr size_t kMaxUnixName = 64;

/// The address of this name in the abstract namespace: it has no file and vanishes with its socket.
[[nodiscard]] socklen_t abstractAddress(sockaddr_un& address, const std::string& name);

/// True if the process at the other end runs as the same user (SO_PEERCRED). Nothing is passed between processes of
/// different users. In a user namespace, the kernel reports every unmapped user as the overflow id, 65534. A process
/// that runs as that id cannot distinguish its own user from others, so the result is false there.
[[nodiscard]] bool sameUser(int socket);

/// Sends one message of `nbytes`, with a descriptor unless `fd` is -1, over a SOCK_SEQPACKET socket. Never waits.
/// Returns false if it was not sent.
[[nodiscard]] bool passMessage(int socket, const void* message, size_t nbytes, int fd);

/// Reads one message of at most `nbytes` and returns its length: 0 at the end, -1 with errno if there is none or it is
/// longer. Never waits. `fd` gets the descriptor that came with the message, if any; the kernel drops any further ones.
[[nodiscard]] ssize_t takeMessage(int socket, void* message, size_t nbytes, UniqueFd& fd);

} // namespace pycomm
