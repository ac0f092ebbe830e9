#include "transport/net/select_address.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"
#include "base/unique_fd.h"

// The list of a host's addresses does not show which of them other ranks can reach: a host has Docker bridges, VPNs and
// a name that Debian maps to 127.0.1.1. But every rank reaches the store's host, so the address that the kernel would
// use towards it is reachable from there. On the store's host itself this address is loopback; that host uses its route
// to a rank elsewhere instead. Three ranks, MASTER_ADDR=alpha:
//
//   rank 0 on alpha: alpha is 127.0.1.1 -> first guess loopback -> way to rank 1's 10.0.0.2 -> 10.0.0.1
//   rank 1 on beta:  alpha is 10.0.0.1 -> 10.0.0.2, kept
//   rank 2 on beta:  the same

namespace pycomm {
namespace {

// Documentation addresses (RFC 5737, RFC 3849): no host has them, so their route is the default route.
constexpr const char* kSomewhereIPv4 = "203.0.113.1";
constexpr const char* kSomewhereIPv6 = "2001:db8::1";

bool familyFits(AddressFamily wanted, const SocketAddress& address) {
  return wanted == AddressFamily::Any || wanted == address.family();
}

// Bridges and pipes to containers and virtual machines: up, with an address, but without a route to other hosts.
bool looksVirtual(const std::string& name) {
  constexpr std::array<const char*, 6> kPrefixes = {"docker", "br-", "veth", "virbr", "cni", "lxc"};
  return std::any_of(
      kPrefixes.begin(), kPrefixes.end(), [&](const char* prefix) { return name.rfind(prefix, 0) == 0; });
}

bool allowed(const InterfaceSpec& spec, const Interface& interface) {
  return interface.up && spec.matches(interface.name);
}

// The first address of the first interface, trying in this order: routable IPv4, routable IPv6 of the same interface,
// and only when no interface has any, link-local ones.
std::optional<AddressChoice> firstAddress(
    const std::vector<Interface>& interfaces,
    AddressFamily family,
    const std::string& why) {
  for (const bool link_local : {false, true}) {
    for (const Interface& interface : interfaces) {
      for (const AddressFamily preferred : {AddressFamily::IPv4, AddressFamily::IPv6}) {
        for (const SocketAddress& address : interface.addresses) {
          if (address.family() == preferred && familyFits(family, address) && address.isLinkLocal() == link_local) {
            return AddressChoice{address, interface.name, why};
          }
        }
      }
    }
  }
  return std::nullopt;
}

std::vector<Interface> keep(
    const std::vector<Interface>& interfaces,
    const std::function<bool(const Interface&)>& wanted) {
  std::vector<Interface> kept;
  std::copy_if(interfaces.begin(), interfaces.end(), std::back_inserter(kept), wanted);
  return kept;
}

[[noreturn]] void throwNoInterface(const AddressPolicy& policy, const HostNetwork& network, const std::string& what) {
  const std::string family = policy.family == AddressFamily::Any
      ? ""
      : std::string(" with an ") + addressFamilyName(policy.family) + " address";
  const bool network_is_down = std::none_of(
      network.interfaces.begin(), network.interfaces.end(), [](const Interface& interface) { return interface.up; });
  throw Error(
      ErrorCode::NoInterface,
      what + family + "; this host has " + describeInterfaces(network.interfaces),
      network_is_down
          ? "start the network of this host or container; a job on one host needs lo alone (ip link set lo up)"
          : "set PYCOMM_SOCKET_IFNAME to the interface that the other hosts reach");
}

AddressChoice chosenBySpec(const AddressPolicy& policy, const HostNetwork& network) {
  const std::vector<Interface> matching = policy.spec.select(network.interfaces);
  const std::string spec = "\"" + policy.spec.text() + "\"";
  const std::string why =
      policy.spec.patterns.size() > 1 ? "the first of " + spec + " that is up" : "chosen by " + spec;
  const auto choice = firstAddress(keep(matching, [](const Interface& i) { return i.up; }), policy.family, why);
  if (!choice) {
    throwNoInterface(policy, network, "no interface matching " + spec + " is up");
  }
  return *choice;
}

// The source address towards `destination`, unless it is loopback or of an interface that is not allowed.
std::optional<AddressChoice> towards(
    const SocketAddress& destination,
    const AddressPolicy& policy,
    const HostNetwork& network,
    const std::string& why) {
  if (destination.empty() || !familyFits(policy.family, destination)) {
    return std::nullopt;
  }
  const auto source = network.sourceTo(destination);
  if (!source || source->isLoopback()) {
    return std::nullopt;
  }
  for (const Interface& interface : network.interfaces) {
    for (const SocketAddress& address : interface.addresses) {
      // Not compared by interface: routed networks put a host's own address on lo.
      if (address.sameIp(*source) && allowed(policy.spec, interface)) {
        return AddressChoice{address, interface.name, why};
      }
    }
  }
  return std::nullopt;
}

std::optional<AddressChoice> defaultRoute(const AddressPolicy& policy, const HostNetwork& network) {
  for (const char* somewhere : {kSomewhereIPv4, kSomewhereIPv6}) {
    if (auto choice = towards(SocketAddress::parse(somewhere, 9), policy, network, "default route")) {
      return choice;
    }
  }
  for (const bool virtual_too : {false, true}) {
    const auto candidates = keep(network.interfaces, [&](const Interface& interface) {
      return allowed(policy.spec, interface) && !interface.loopback && (virtual_too || !looksVirtual(interface.name));
    });
    if (auto choice = firstAddress(candidates, policy.family, "first interface that is up")) {
      return choice;
    }
  }
  return std::nullopt;
}

std::optional<AddressChoice> loopback(const AddressPolicy& policy, const HostNetwork& network, const std::string& why) {
  const auto candidates = keep(network.interfaces, [&](const Interface& interface) {
    return allowed(policy.spec, interface) && interface.loopback;
  });
  return firstAddress(candidates, policy.family, why);
}

bool oneKernel(const std::vector<RankRoute>& everyone) {
  return std::all_of(everyone.begin(), everyone.end(), [&](const RankRoute& route) {
    return route.identity == everyone.front().identity;
  });
}

AddressChoice chooseOfFamily(
    const AddressPolicy& policy,
    const HostNetwork& network,
    const std::vector<RankRoute>& everyone,
    size_t rank) {
  if (!policy.spec.empty() && !policy.spec.exclude) {
    AddressChoice choice = chosenBySpec(policy, network);
    if (choice.address.isLoopback() && !oneKernel(everyone)) {
      throwNoInterface(
          policy, network, "interface " + choice.interface_name + " was chosen, but some ranks are on other hosts");
    }
    return choice;
  }
  if (onOneHost(everyone)) {
    if (auto choice = loopback(policy, network, "all ranks are on this host")) {
      return *choice;
    }
  }
  AddressChoice guess = chooseRoute(policy, network);
  if (!guess.address.isLoopback()) {
    return guess;
  }
  for (size_t other = 0; other < everyone.size(); ++other) {
    const SocketAddress& route = everyone[other].route;
    if (other != rank && !route.isLoopback()) {
      const int named = everyone[other].job_rank;
      const std::string why =
          "route to rank " + std::to_string(named < 0 ? static_cast<int>(other) : named) + " at " + route.ip();
      if (auto choice = towards(route.withPort(9), policy, network, why)) {
        return *choice;
      }
    }
  }
  if (auto choice = defaultRoute(policy, network)) {
    return *choice;
  }
  throwNoInterface(policy, network, "no interface of this host leads to the other ranks");
}

} // namespace

HostNetwork HostNetwork::ofThisHost() {
  HostNetwork network;
  network.interfaces = listInterfaces();
  network.sourceTo = [](const SocketAddress& destination) -> std::optional<SocketAddress> {
    const int family = destination.family() == AddressFamily::IPv6 ? AF_INET6 : AF_INET;
    // Connecting a datagram socket only looks up the route and takes its source address.
    const UniqueFd fd = UniqueFd::from([&] { return ::socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0); });
    const SocketAddress target = destination.port() == 0 ? destination.withPort(9) : destination;
    sockaddr_storage source{};
    socklen_t length = sizeof source;
    if (!fd || ::connect(fd.get(), target.raw(), target.rawLength()) != 0 ||
        ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&source), &length) != 0) {
      return std::nullopt;
    }
    return SocketAddress::fromSockaddr(reinterpret_cast<const sockaddr*>(&source), length).withPort(0);
  };
  network.lookUp = [](const std::string& host) -> std::vector<SocketAddress> {
    try {
      return resolve(host);
    } catch (const Error&) {
      return {}; // the store was reached by other means; without the name there is only one hint less
    }
  };
  return network;
}

bool onOneHost(const std::vector<RankRoute>& everyone) {
  // The route counts besides the identity: virtual machines cloned from one snapshot can agree in everything else.
  return oneKernel(everyone) && std::all_of(everyone.begin(), everyone.end(), [&](const RankRoute& route) {
           return route.route.sameIp(everyone.front().route);
         });
}

AddressChoice chooseRoute(const AddressPolicy& policy, const HostNetwork& network) {
  if (!policy.spec.empty() && !policy.spec.exclude) {
    return chosenBySpec(policy, network);
  }
  const std::vector<SocketAddress> store =
      policy.store_host.empty() ? std::vector<SocketAddress>() : network.lookUp(policy.store_host);
  bool store_is_here = false;
  for (const SocketAddress& address : store) {
    if (auto choice = towards(address, policy, network, "route to the store's host " + address.ip())) {
      return *choice;
    }
    const auto source = network.sourceTo(address);
    store_is_here = store_is_here || (source && source->isLoopback());
  }
  if (!store_is_here) {
    if (auto choice = defaultRoute(policy, network)) {
      return *choice;
    }
  }
  if (auto choice = loopback(policy, network, "the store is on this host")) {
    return *choice;
  }
  if (auto choice = defaultRoute(policy, network)) {
    return *choice;
  }
  throwNoInterface(policy, network, "no interface of this host is up");
}

AddressChoice chooseAddress(
    const AddressPolicy& policy,
    const HostNetwork& network,
    const std::vector<RankRoute>& everyone,
    size_t rank) {
  // All ranks must use one family. Unless the user chose it, the first rank with a routable address decides.
  const auto first = std::find_if(everyone.begin(), everyone.end(), [](const RankRoute& route) {
    return !route.route.empty() && !route.route.isLoopback();
  });
  if (policy.family == AddressFamily::Any && first != everyone.end() && !onOneHost(everyone)) {
    AddressPolicy agreed = policy;
    agreed.family = first->route.family();
    // If this host lacks that family, it binds one that it has; the ranks compare families after all have bound.
    try {
      const AddressChoice choice = chooseOfFamily(agreed, network, everyone, rank);
      if (!choice.address.isLinkLocal() || first->route.isLinkLocal()) {
        return choice;
      }
    } catch (const Error&) { // NOLINT: the next attempt reports
    }
  }
  return chooseOfFamily(policy, network, everyone, rank);
}

} // namespace pycomm
