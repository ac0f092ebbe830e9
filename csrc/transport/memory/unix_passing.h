#pragma once

#include <sys/types.h>

#include <cstddef>

#include "base/unique_fd.h"

namespace pycomm {

/// Sends one message of `nbytes`, with a descriptor unless `fd` is -1, over a SOCK_SEQPACKET socket. Never waits.
/// Returns false if it was not sent.
[[nodiscard]] bool passMessage(int socket, const void* message, size_t nbytes, int fd);

/// Reads one message of at most `nbytes` and returns its length: 0 at the end, -1 with errno if there is none or it is
/// longer. Never waits. `fd` gets the descriptor that came with the message, if any; the kernel drops any further ones.
[[nodiscard]] ssize_t takeMessage(int socket, void* message, size_t nbytes, UniqueFd& fd);

} // namespace pycomm
