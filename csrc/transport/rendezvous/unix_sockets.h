#pragma once

#include <string>
#include <vector>

#include "transport/net/address.h"
#include "transport/net/listener.h"
#include "transport/rendezvous/rank_record.h"

namespace pycomm {

/// The Unix socket of a rank for the other ranks of its host, and those of them that it reaches. It is found by trying: containers, users,
/// user namespaces and security modules may each stand between two ranks of one host.
class UnixSockets {
 public:
  /// Listens on a socket, if `wanted`. Where this process may have none, one INFO line says so, and ranks connect over TCP.
  explicit UnixSockets(bool wanted);

  /// For RankRecord::unix_socket; empty if there is none.
  [[nodiscard]] const std::string& name() const noexcept {
    return name_;
  }
  /// Tries a connection to every rank of this host; one INFO line for each that is not reached. Does not wait.
  void reach(const std::vector<RankRecord>& records, int rank);
  /// After reach(): by rank; empty for this rank, and for those that are not reached.
  [[nodiscard]] const std::vector<SocketAddress>& reached() const noexcept {
    return reached_;
  }
  /// After reach(): this rank has a socket and reaches all others.
  [[nodiscard]] bool reachesAll() const noexcept {
    return all_;
  }
  /// After reach(): the listener, if another rank of this host may come to it; else an empty one.
  [[nodiscard]] Listener take() noexcept {
    return has_local_peers_ ? std::move(listener_) : Listener();
  }

 private:
  std::string name_;
  Listener listener_;
  std::vector<SocketAddress> reached_;
  bool all_ = false;
  bool has_local_peers_ = false;
};

} // namespace pycomm
