#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/net/address.h"

namespace pycomm {

/// One network interface of this host.
struct Interface {
  std::string name;
  std::vector<SocketAddress> addresses; ///< port 0
  bool up = false;
  bool loopback = false;
};

/// In the kernel's order. Interfaces without an address are listed too.
[[nodiscard]] std::vector<Interface> listInterfaces();

/// "eth0 (10.0.0.1, fe80::1%eth0), eth1 (down), lo (127.0.0.1, ::1)": for errors and reports.
[[nodiscard]] std::string describeInterfaces(const std::vector<Interface>& interfaces);

/// The interfaces that a user allows, in the syntax of NCCL_SOCKET_IFNAME. "eth0,eth1": names with these prefixes, of which one is used:
/// the first that is up; "=eth0": exactly this name; "^docker,lo": all names without these prefixes; "^=docker0": all but exactly this name.
/// Spaces around names do not count.
struct InterfaceSpec {
  std::vector<std::string> patterns; ///< empty: the user made no choice
  bool exclude = false;
  bool exact = false;

  /// Throws Error(InvalidArgument) for a mark without a name ("^", "=", "eth0,,eth1").
  [[nodiscard]] static InterfaceSpec parse(const std::string& text);

  [[nodiscard]] bool empty() const noexcept {
    return patterns.empty();
  }
  [[nodiscard]] bool matches(const std::string& name) const;
  /// The allowed ones, best first: in the order of the list, and exact names before names with a prefix ("eth1" before
  /// "eth10"). Throws Error(NoInterface) listing what exists if none is left.
  [[nodiscard]] std::vector<Interface> select(const std::vector<Interface>& interfaces) const;
  [[nodiscard]] std::string text() const;
};

} // namespace pycomm
