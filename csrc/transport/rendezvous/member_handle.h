#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/net/address.h"
#include "transport/net/host_identity.h"
#include "transport/secure/tls_context.h"

namespace pycomm {

/// Where a process of a group that can be reconfigured is found: what reconfigure() gets for each member.
///
/// It holds the process's own addresses and nothing of a store, so it is valid for as long as that process has the group. ASCII, one line:
///
///   pycomm1:v=6;i=<incarnation>;d=<endpoint>;n=<nonce>;k=<key id>;h=<host identity>;p=<pid>;r=<rank>;u=<Unix socket>;w=<watch>;a=10.0.0.1:4711,127.0.0.1:4711;
///
/// Unknown fields are passed over, so that a later version may add some.
struct MemberHandle {
  static constexpr size_t kMaxNbytes = 1024;
  static constexpr size_t kMaxAddresses = 8;

  int version = 0; ///< FrameHeader::kVersion of the process
  ProcessId incarnation; ///< of this group in that process: another group, or a process started again, has another
  ProcessId endpoint; ///< whom a connection goes to in TLS
  uint64_t nonce = 0; ///< of a Hello to the endpoint: it keeps connections for an earlier owner of the port out
  std::string key_id; ///< of the secret; empty: none
  HostIdentity host;
  int64_t pid = 0;
  int job_rank = -1; ///< of the process; -1: this is of a default group, whose ranks are the job's
  std::string unix_socket; ///< name; empty: none
  std::string watch_name; ///< LocalPeers::name(): where processes of its host find its record; empty: none
  std::vector<SocketAddress> addresses; ///< TCP, the best first; empty: only this host reaches it

  [[nodiscard]] std::string text() const;
  /// Takes any bytes. Throws Error(InvalidArgument) that says what is wrong, or Error(VersionMismatch).
  [[nodiscard]] static MemberHandle parse(const std::string& text);

  /// "host b, pid 77"
  [[nodiscard]] std::string who() const;
};

/// Where a process on host `from` finds an endpoint, the best first: its Unix socket and loopback within the host, all else from other hosts. A
/// function of the two alone, so that all members agree about it. `unix_sockets`: whether they may be used.
[[nodiscard]] std::vector<SocketAddress> waysTo(const MemberHandle& to, const HostIdentity& from, bool unix_sockets);

/// The address, in the list, that best shows which of its own interfaces a member should use: of the first member on another host. Empty if
/// all are on one host. It takes the place of the store's host in AddressPolicy.
[[nodiscard]] std::string routeHint(const std::vector<MemberHandle>& members, size_t self);

/// 128 bits, in 32 hexadecimal digits, that name one meeting: of `uuid` and the incarnations in the order of ranks.
[[nodiscard]] std::string instanceOf(int64_t uuid, const std::vector<MemberHandle>& members);

} // namespace pycomm
