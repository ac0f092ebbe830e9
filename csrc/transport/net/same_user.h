#pragma once

#include <string>

#include "base/unique_fd.h"

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

} // namespace pycomm
