#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "transport/net/address.h"
#include "transport/net/host_identity.h"
#include "transport/net/interfaces.h"

namespace pycomm {

/// The user's settings.
struct AddressPolicy {
  InterfaceSpec spec;
  AddressFamily family = AddressFamily::Any;
  std::string store_host; ///< as the user wrote it (MASTER_ADDR); empty for a file store
};

/// The network of this host. Functions, so that tests can simulate any host.
struct HostNetwork {
  std::vector<Interface> interfaces;
  /// The source address that the routing table gives for a destination. Sends nothing.
  std::function<std::optional<SocketAddress>(const SocketAddress& destination)> sourceTo;
  /// All addresses of a name; empty if it has none.
  std::function<std::vector<SocketAddress>(const std::string& host)> lookUp;

  [[nodiscard]] static HostNetwork ofThisHost();
};

/// A local address to bind (port 0), and the reason for it, for reports.
struct AddressChoice {
  SocketAddress address;
  std::string interface_name;
  std::string why; ///< "route to the store's host 10.0.0.1"
};

/// One rank's first guess, published before any rank has bound a port.
struct RankRoute {
  HostIdentity identity;
  SocketAddress route; ///< its chooseRoute(); may be loopback
  int job_rank = -1; ///< what reports call it; -1: its place in the list
};

/// First guess, made before the other ranks are known: the spec's interface, else the source address of the route to
/// the store's host. Loopback means that this is the store's host, or that there is no better guess. Throws
/// Error(NoInterface).
[[nodiscard]] AddressChoice chooseRoute(const AddressPolicy& policy, const HostNetwork& network);

/// The address to bind, once every rank's first guess is known. `everyone` has one entry per rank, this one at index
/// `rank`. Loopback only if all ranks are on this host. Throws Error(NoInterface).
[[nodiscard]] AddressChoice chooseAddress(
    const AddressPolicy& policy,
    const HostNetwork& network,
    const std::vector<RankRoute>& everyone,
    size_t rank);

/// True if all ranks can reach each other over loopback.
[[nodiscard]] bool onOneHost(const std::vector<RankRoute>& everyone);

} // namespace pycomm
