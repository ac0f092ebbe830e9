#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace pycomm {

/// The running kernel and network namespace of a process. Processes with equal identities reach each other over
/// loopback. The host's name counts too, because cloned virtual machines can start with the same boot id. A wrong
/// "different" only costs the detour over a real interface, while a wrong "same" fails.
struct HostIdentity {
  std::string boot_id; ///< /proc/sys/kernel/random/boot_id
  uint64_t network_namespace = 0; ///< inode of /proc/self/ns/net
  std::string hostname;

  [[nodiscard]] static HostIdentity ofThisProcess();

  /// One token without spaces.
  [[nodiscard]] std::string wireText() const;
  /// Reads wireText(). Accepts any text; nullopt for anything else.
  [[nodiscard]] static std::optional<HostIdentity> fromWireText(const std::string& text);

  friend bool operator==(const HostIdentity& a, const HostIdentity& b) {
    return a.boot_id == b.boot_id && a.network_namespace == b.network_namespace && a.hostname == b.hostname;
  }
  friend bool operator!=(const HostIdentity& a, const HostIdentity& b) {
    return !(a == b);
  }
};

/// What this process can know about another one.
enum class Life : uint8_t {
  Lives,
  Ended, ///< also if its parent has not reaped it yet
  Unknown, ///< it has another pid namespace, or /proc does not show it
};

/// Identifies one process of a host, also against a later one with the same pid.
struct ProcessIdentity {
  int64_t pid = 0;
  uint64_t pid_namespace = 0;
  uint64_t start_ticks = 0; ///< since boot, from /proc/self/stat

  [[nodiscard]] static ProcessIdentity ofThisProcess();
  /// Call for processes of this host.
  [[nodiscard]] Life life() const;

  [[nodiscard]] std::string wireText() const;
  [[nodiscard]] static std::optional<ProcessIdentity> fromWireText(const std::string& text);

  friend bool operator==(const ProcessIdentity& a, const ProcessIdentity& b) {
    return a.pid == b.pid && a.pid_namespace == b.pid_namespace && a.start_ticks == b.start_ticks;
  }
};

} // namespace pycomm
