#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "transport/net/address.h"
#include "transport/rendezvous/member_handle.h"

namespace pycomm {

/// A port at which processes that know no handle find the members of an elastic training: "pycomm://alpha,beta:29600". On each of these
/// hosts one member listens there (Endpoint::offer), and answers one question: who the members are. Its answer is what they would write into a
/// file (PeersFile), and what their endpoints answer to a process that knows a handle: Endpoint::Mailbox::notice().
///
/// The port has no owner that a handle could name, so all members use one number for its Hello, and one process id in TLS. The secret
/// protects it as it protects endpoints: a client has to know it, and so has the member that answers.
struct FixedPort {
  std::vector<std::string> hosts; ///< names or addresses, in the order in which they are asked
  uint16_t port = 0;

  static constexpr uint64_t kNonce = 0x7079636f6d6d3a2f; // "pycomm:/"
  static inline const ProcessId kProcess = "7079636f6d6d3a2f2f70656572730000"; // "pycomm://peers"

  /// The addresses of one of the hosts, with the port; none if the name has none. May wait for half of the time until the deadline.
  [[nodiscard]] std::vector<SocketAddress> addressesOf(const std::string& host, Deadline deadline) const;
  /// Where this process has to listen: at those of all addresses that are this host's. If there are any, also where its endpoint listens: a name
  /// may lead to another interface, and on its own host often leads to loopback only. None: this host is not one of the hosts.
  [[nodiscard]] std::vector<SocketAddress> addressesHere(const MemberHandle& self, Deadline deadline) const;
  /// Of the process that listens at this address: for dial().
  [[nodiscard]] static MemberHandle listenerAt(const SocketAddress& address, const MemberHandle& self);
};

} // namespace pycomm
