// How LocalPeers asks another process for the memory of a group, and answers who asks for a report.
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "base/error.h"
#include "engine/monitor/host_greeting.h"
#include "engine/monitor/local_peers.h"
#include "transport/memory/shared_arena.h"
#include "transport/net/address.h"
#include "transport/net/unix_peer.h"

namespace pycomm {

UniqueFd connectToLocalPeer(const std::string& name) {
  return connectToSameUser(name, SOCK_SEQPACKET);
}

UniqueFd LocalPeers::ask(const std::string& name, const MemoryKey& key, Deadline deadline, const AbortToken& abort) {
  if (name.empty() || name.size() > kMaxUnixName) {
    throw Error(ErrorCode::Unsupported, "the rank that would share memory cannot be reached by a Unix socket");
  }
  const UniqueFd socket = connectToLocalPeer(name);
  if (!socket) {
    throw Error(systemError(ErrorCode::SystemError, "no connection to the rank that would share memory", errno));
  }
  Ask question;
  question.key = key;
  UniqueFd memory;
  bool asked = false;
  while (!deadline.expired()) {
    abort.throwIfAborted();
    pollfd ready{socket.get(), POLLIN, 0};
    (void)::poll(&ready, 1, deadline.remainingMs(kAbortSliceMs));
    Ask reply; // the greeting comes first, and is shorter
    const ssize_t got = takeMessage(socket.get(), &reply, sizeof reply, memory);
    if (got == static_cast<ssize_t>(sizeof(Greeting)) && !std::exchange(asked, true)) {
      memory.reset(); // its words: somebody else watches
      if (!passMessage(socket.get(), &question, sizeof question, -1)) {
        throw Error(systemError(ErrorCode::SystemError, "the rank that would share memory hung up", errno));
      }
    } else if (got == static_cast<ssize_t>(sizeof reply) && reply.magic == Ask::kMagic && reply.key == key) {
      if (reply.there == 0 || !memory) {
        throw Error(ErrorCode::Unsupported, "the rank that would share memory has none");
      }
      return memory;
    } else if (got >= 0 || (errno != EAGAIN && errno != EINTR)) {
      throw Error(ErrorCode::Unsupported, "the rank that would share memory hung up");
    }
  }
  throw Error(ErrorCode::Unsupported, "the rank that would share memory did not answer in time");
}

void LocalPeers::answerReport(int socket) noexcept {
  AskReport reply;
  std::optional<SharedArena> memory;
  try {
    const std::string report = report_ ? report_() : "";
    if (!report.empty()) {
      memory.emplace(SharedArena::create(report.size()));
      memory->commit(0, report.size());
      std::memcpy(memory->at(0), report.data(), report.size());
      reply.there = 1;
      reply.nbytes = report.size();
    }
  } catch (const std::exception&) { // no memory: the reply is that there is no report
    reply = {};
    memory.reset();
  }
  (void)passMessage(socket, &reply, sizeof reply, memory ? memory->fd() : -1);
}

} // namespace pycomm
