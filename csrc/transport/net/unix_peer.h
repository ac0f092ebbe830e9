#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>

#include "base/unique_fd.h"

// The process at the other end of a Unix socket: whose it is, and messages with a descriptor to it and from it.

namespace pycomm {

/// True if the process at the other end of this connected Unix socket runs as the same user (SO_PEERCRED). Processes of
/// different users pass each other nothing. In a user namespace, the kernel reports every unmapped user as the overflow
/// id, 65534. A process that runs as that id cannot distinguish its own user from others, so the result is false there.
[[nodiscard]] bool sameUser(int socket);
/// False if this process runs as such an id, so that sameUser() is never true here.
[[nodiscard]] bool canTellOwnUser();
/// A nonblocking connection of this type (SOCK_STREAM, SOCK_SEQPACKET) to SocketAddress::unixSocket(name), if the process
/// there runs as the same user; else an empty one, and errno says why.
[[nodiscard]] UniqueFd connectToSameUser(const std::string& name, int type);

/// Sends one message of `nbytes`, with a descriptor unless `fd` is -1, over a SOCK_SEQPACKET socket. Never waits.
/// Returns false if it was not sent.
[[nodiscard]] bool passMessage(int socket, const void* message, size_t nbytes, int fd);

/// Reads one message of at most `nbytes` and returns its length: 0 at the end, -1 with errno if there is none or it is
/// longer. Never waits. `fd` gets the descriptor that came with the message, if any; the kernel drops any further ones.
[[nodiscard]] ssize_t takeMessage(int socket, void* message, size_t nbytes, UniqueFd& fd);

} // namespace pycomm
