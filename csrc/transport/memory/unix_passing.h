#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <string>

#include "base/unique_fd.h"

namespace pycomm {

/// No name of a Unix socket of pycomm is longer.
inline constexpr size_t kMaxUnixName = 64;

/// The address of that name in the abstract namespace: no file, gone with its socket.
[[nodiscard]] socklen_t abstractAddress(sockaddr_un& address, const std::string& name);

/// Whether the process at the other end runs as the same user (SO_PEERCRED). Between processes of different users nothing is passed.
/// In a user namespace the kernel names every user that it does not map by the overflow id, 65534: a process that runs as that id there
/// cannot tell its own user from others, so it has no same user.
[[nodiscard]] bool sameUser(int socket);

/// One message of `nbytes` with a descriptor (none for -1) over a SOCK_SEQPACKET socket. Never waits. False if it did not go.
[[nodiscard]] bool passMessage(int socket, const void* message, size_t nbytes, int fd);

/// Reads one message, of at most `nbytes`: its length; 0 at the end, -1 with errno where there is none or it is longer. Never waits.
/// `fd` gets the descriptor that came with it, if one did; the kernel drops any further ones.
[[nodiscard]] ssize_t takeMessage(int socket, void* message, size_t nbytes, UniqueFd& fd);

} // namespace pycomm
