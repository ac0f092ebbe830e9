#pragma once

#include <functional>
#include <memory>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "engine/operation/group_identity.h"
#include "transport/link.h"

namespace pycomm {

/// Opens the connections of this rank to other ranks of its group: connects (over a Unix socket if it reaches the peer by one, else over
/// TCP, in TLS if the group has a secret), says who this rank is (Hello), and takes the reply. A link is up only then. Every link of a group
/// is opened here; UnixSockets and LocalPeers open connections of their own within a host.
class Connector {
 public:
  /// The identity outlives this.
  explicit Connector(const GroupIdentity& identity) : identity_(identity) {}

  /// Begins to open a bulk link; it is up when its finishConnect() returns true.
  /// Throws what startConnect() throws.
  [[nodiscard]] std::unique_ptr<Link> startBulk(int peer) const;
  /// The same for a connection that only rings for a link in shared memory.
  [[nodiscard]] std::unique_ptr<Link> startBell(int peer) const;
  /// Opens a control link, and waits until it is up. `look` is called every 3 s and before this gives up: it throws if the group will
  /// not form. Throws that, the token's reason, and Error(ConnectFailed | PeerDead) with the peer's rank and host.
  [[nodiscard]] std::unique_ptr<Link> openControl(
      int peer,
      Deadline deadline,
      const AbortToken& abort,
      const std::function<void()>& look) const;

 private:
  const GroupIdentity& identity_;
};

} // namespace pycomm
