#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/job_ranks.h"
#include "engine/operation/group_title.h"
#include "transport/memory/memory_key.h"
#include "transport/net/address.h"
#include "transport/net/hello.h"
#include "transport/secure/tls_context.h"

namespace pycomm {

/// Who a rank is in its group, and where the other ranks are. Does not change after the group has formed.
struct GroupIdentity {
  int rank = 0;
  int size = 1;
  JobRanks job; ///< what errors and logs call its ranks; `rank` and all lists by rank have the group's own numbers
  std::string name; ///< by which its ranks meet; torch's own is a number or a hash
  std::shared_ptr<GroupTitle> title = std::make_shared<GroupTitle>();
  uint32_t hash = 0;
  int64_t epoch = 0; ///< RendezvousConfig::epoch
  uint64_t nonce = 0;
  uint64_t run = 0; ///< as random as the nonce, but grants no access: identifies this group in files and in the store
  std::vector<std::string> hosts; ///< by rank
  std::vector<SocketAddress> addresses; ///< where each rank listens; empty ones if no rank of the group has a port
  std::vector<SocketAddress> unix_sockets; ///< by rank; empty for a rank that this one does not reach by a Unix socket
  SocketAddress local_address; ///< to connect from
  /// At which other hosts reach this rank, without a port; empty if the ranks need none.
  [[nodiscard]] SocketAddress addressForOthers() const {
    const bool none = local_address.empty() || local_address.isUnix() || local_address.isLoopback();
    return none ? SocketAddress() : local_address.withPort(0);
  }
  std::string interface_name;
  std::shared_ptr<const TlsContext>
      tls; ///< of this process; null: the group has no secret, and its connections are plain
  std::vector<ProcessId> processes; ///< by rank, if there is a secret
  uint64_t unix_nonce =
      0; ///< of a Hello over a Unix socket: it is not in TLS, so with a secret only its holders know this
  MemoryKey memory_key; ///< of what its ranks on a host share there

  /// What frames and Hellos have of it.
  [[nodiscard]] uint16_t epochOnWire() const noexcept {
    return static_cast<uint16_t>(epoch);
  }

  [[nodiscard]] bool isRank(int number) const noexcept {
    return number >= 0 && number < size;
  }
  /// The host of a rank. Empty for a number that is no rank of this group: some numbers come from the store or from another process.
  [[nodiscard]] std::string host(int number) const {
    const auto index = static_cast<size_t>(number);
    return number >= 0 && index < hosts.size() ? hosts[index] : std::string();
  }
  /// How error messages name a rank: "rank 2 on alpha".
  [[nodiscard]] std::string rankText(int number) const {
    return job.text(number) + " on " + host(number);
  }
  /// The same at the beginning of a sentence.
  [[nodiscard]] std::string rankTitle(int number) const {
    return "R" + rankText(number).substr(1);
  }
  /// The number of this rank in the job.
  [[nodiscard]] int jobRank() const noexcept {
    return job.of(rank);
  }
  /// What errors call the group.
  [[nodiscard]] std::string called() const {
    std::string chosen = title->get();
    return chosen.empty() ? name : chosen;
  }
  /// How texts name the group: "group 0", "group 'dp' of ranks 1, 3".
  [[nodiscard]] std::string text() const {
    return text(called(), job.list());
  }
  [[nodiscard]] static std::string text(const std::string& name, const std::string& ranks) {
    return ranks.empty() ? "group " + name : "group '" + name + "' of ranks " + ranks;
  }
  /// Says in a record which group it is about, and who tells it.
  void sign(ErrorRecord& record) const {
    record.rank = jobRank();
    record.host = host(rank);
    record.group = called();
    record.group_ranks = job.list();
    record.epoch = epoch;
  }
  /// Says in a record who is to blame, or was waited for.
  void blame(ErrorRecord& record, int peer) const {
    record.peer = job.of(peer);
    record.peer_host = host(peer);
  }

  /// Whether the ranks have ports: all or none. Without ports, this rank has reached all others by Unix sockets, whatever the store says.
  [[nodiscard]] bool hasPorts() const noexcept {
    return static_cast<size_t>(rank) < addresses.size() && !addresses[static_cast<size_t>(rank)].empty();
  }

  /// The two ends of a connection to `peer`.
  struct Endpoints {
    const SocketAddress& local;
    const SocketAddress& remote;
  };
  /// Throws Error(Internal) if `peer` is no rank of this group.
  [[nodiscard]] Endpoints endpoints(int peer) const {
    static const SocketAddress any;
    if (const auto index = static_cast<size_t>(peer); index < unix_sockets.size() && !unix_sockets[index].empty()) {
      return {any, unix_sockets[index]};
    }
    if (peer < 0 || static_cast<size_t>(peer) >= addresses.size()) {
      throw Error(ErrorCode::Internal, job.text(peer) + " has no address in " + text());
    }
    return {local_address, addresses[static_cast<size_t>(peer)]};
  }

  /// How a connection to a rank, between these endpoints, is made secure. The kernel carries the bytes of a Unix socket, for this user alone.
  [[nodiscard]] TlsTarget tlsTo(int peer, const Endpoints& ends) const {
    return tls == nullptr || ends.remote.isUnix() ? TlsTarget{}
                                                  : TlsTarget{tls, processes.at(static_cast<size_t>(peer))};
  }
  /// How this rank introduces itself on a connection between these endpoints.
  [[nodiscard]] Hello hello(LinkPurpose purpose, const Endpoints& ends) const {
    Hello hello = this->hello(purpose);
    hello.nonce = ends.remote.isUnix() ? unix_nonce : nonce;
    return hello;
  }
  /// The same over TCP, or in a simulator: not for a Unix socket, whose Hello has another nonce.
  [[nodiscard]] Hello hello(LinkPurpose purpose) const {
    Hello hello;
    hello.nonce = nonce;
    hello.rank = rank;
    hello.size = size;
    hello.epoch = epochOnWire();
    hello.group = hash;
    hello.purpose = purpose;
    return hello;
  }
};

} // namespace pycomm
