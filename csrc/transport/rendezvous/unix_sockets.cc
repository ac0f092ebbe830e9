#include "transport/rendezvous/unix_sockets.h"

#include <sys/socket.h>

#include <cerrno>

#include "base/error.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "transport/net/unix_peer.h"

namespace pycomm {
namespace {

// 0, or the errno that says why ranks connect over TCP instead.
int tryToConnect(const std::string& name) {
  const Fault fault = PYCOMM_FAULT("unix.reach");
  if (fault.error_number != 0) {
    return fault.error_number;
  }
  if (connectToSameUser(name, SOCK_STREAM)) {
    return 0;
  }
  // A full queue belongs to a socket that is there. Many ranks fill it, and so can any other user: this must not bring the ranks to
  // open ports. Its owner empties it as soon as it knows all ranks, and later connections wait for that and see the user.
  return errno == EAGAIN ? 0 : errno;
}

} // namespace

UnixSockets::UnixSockets(bool wanted) {
  if (!wanted) {
    return;
  }
  if (!canTellOwnUser()) {
    log(LogLevel::Info,
        "ranks of this host connect over TCP: this process runs as the user to which all unmapped ones are mapped");
    return;
  }
  try {
    name_ = randomUnixName();
    listener_ = Listener::bindUnix(name_);
  } catch (const Error& error) {
    name_.clear();
    log(LogLevel::Info, std::string("ranks of this host connect over TCP: ") + error.what());
  }
}

void UnixSockets::reach(const std::vector<RankRecord>& records, int rank) {
  const RankRecord& mine = records[static_cast<size_t>(rank)];
  reached_.assign(records.size(), {});
  all_ = !name_.empty();
  has_local_peers_ = false;
  for (const RankRecord& record : records) {
    if (record.rank == rank) {
      continue;
    }
    int error_number = ENOENT;
    if (!name_.empty() && record.identity == mine.identity) {
      has_local_peers_ = has_local_peers_ || !record.unix_socket.empty();
      error_number = record.unix_socket.empty() ? ENOENT : tryToConnect(record.unix_socket);
      if (error_number != 0) {
        log(LogLevel::Info,
            record.who() + " is reached over TCP, not by a Unix socket: " +
                (record.unix_socket.empty() ? "it has none" : errnoText(error_number)));
      }
    }
    if (error_number == 0) {
      reached_[static_cast<size_t>(record.rank)] = SocketAddress::unixSocket(record.unix_socket);
    } else {
      all_ = false;
    }
  }
}

} // namespace pycomm
