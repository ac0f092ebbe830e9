#pragma once

#include <string>
#include <vector>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "engine/engine.h"
#include "engine/operation/roster.h"
#include "engine/planes.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

/// Auto: shared memory between ranks of one host if it can be had, else Unix sockets, and TCP between hosts. SharedMemory: an error unless
/// the whole group can use it. Tcp: neither shared memory nor Unix sockets.
enum class Transport { Auto, SharedMemory, Tcp };

/// How the ranks of a group come to share memory while it forms: the first rank of each host makes it, the others ask its process for
/// it, and then all say in the store whether they have it. It holds the rings of the links between ranks of that host, and where the
/// whole group is on one host, what its HostPlane needs; that is used only if every rank has it.
class MemorySharing final {
 public:
  /// The planes are open. All outlive this; `failed` is set if the group fails meanwhile.
  MemorySharing(Engine& engine, Store& store, const Roster& roster, Planes& planes, const AbortToken& failed) noexcept
      : engine_(engine), store_(store), roster_(roster), identity_(roster.identity), planes_(planes), failed_(failed) {}

  /// Opens the memory and gives it to the planes: rings to the data plane, and on one host a HostPlane. Returns why there is no
  /// HostPlane; empty if there is one, or if nobody wants one (one rank, Transport::Tcp). All ranks call it. Blocks. Throws
  /// Error(Unsupported) if SharedMemory was asked for and cannot be had, what exchangeTexts() throws, and the token's reason.
  [[nodiscard]] std::string share(Transport transport, Deadline deadline);

 private:
  struct Opened;
  void open(Deadline deadline, Opened& opened);
  void mapHeap(HostHeaps& heaps, int rank, Deadline patience);
  [[nodiscard]] std::vector<std::string> vote(Deadline deadline, Opened& opened);
  void openHostPlane(Opened opened);
  [[nodiscard]] MemoryKey heapKey(int rank) const noexcept;
  void logWithout(const std::string& why) const;

  Engine& engine_;
  Store& store_;
  const Roster& roster_;
  const GroupIdentity& identity_; ///< in roster_
  Planes& planes_;
  const AbortToken& failed_;
};

} // namespace pycomm
