#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace pycomm {

/// Upper bound of the length of the names that pycomm gives its Unix sockets.
inline constexpr size_t kMaxUnixName = 64;

enum class AddressFamily : uint8_t { Any = 0, Unix = 1, IPv4 = 4, IPv6 = 6 };

[[nodiscard]] const char* addressFamilyName(AddressFamily family) noexcept;

/// 16 random hexadecimal digits. Throws Error(SystemError).
[[nodiscard]] std::string randomUnixName();

/// One IPv4 or IPv6 address with a port, or the name of a Unix socket. A value; a default-constructed one is empty. An
/// IPv4 address written as IPv6 (::ffff:10.0.0.1) becomes IPv4, so that equal addresses compare equal.
class SocketAddress {
 public:
  SocketAddress() = default;

  /// From a literal: "10.0.0.1", "fe80::1%eth0", "[::1]". Names are for resolve(). Throws Error(InvalidArgument).
  [[nodiscard]] static SocketAddress parse(const std::string& ip, uint16_t port);
  /// The same; nullopt if `ip` is not a literal.
  [[nodiscard]] static std::optional<SocketAddress> tryParse(const std::string& ip, uint16_t port);
  /// A Unix socket of pycomm in the abstract namespace: it has no file, and its name vanishes with it. At most
  /// kMaxUnixName characters, none of them NUL, else Error(InvalidArgument).
  [[nodiscard]] static SocketAddress unixSocket(const std::string& name);
  /// Empty for other families. A Unix socket that is not in the abstract namespace has no name here.
  [[nodiscard]] static SocketAddress fromSockaddr(const sockaddr* address, socklen_t length);
  [[nodiscard]] static SocketAddress loopback(AddressFamily family, uint16_t port = 0);

  [[nodiscard]] bool empty() const noexcept {
    return family_ == AddressFamily::Any;
  }
  [[nodiscard]] AddressFamily family() const noexcept {
    return family_;
  }
  [[nodiscard]] bool isUnix() const noexcept {
    return family_ == AddressFamily::Unix;
  }
  /// 0 for a Unix socket.
  [[nodiscard]] uint16_t port() const noexcept;
  [[nodiscard]] SocketAddress withPort(uint16_t port) const;
  /// The interface index of a link-local IPv6 address, else 0.
  [[nodiscard]] uint32_t scopeId() const noexcept;
  [[nodiscard]] SocketAddress withScopeId(uint32_t scope_id) const;

  /// "10.0.0.1", "fe80::1%eth0"; empty for a Unix socket.
  [[nodiscard]] std::string ip() const;
  /// "10.0.0.1:29600", "[fe80::1%eth0]:29600", "unix:pycomm/4f0c…"; "(none)" when empty, "unix" for one without a name.
  [[nodiscard]] std::string text() const;

  /// The text for other hosts: text() without the scope, which has no meaning there.
  [[nodiscard]] std::string wireText() const;
  /// Reads wireText(). Accepts any text; nullopt for anything else.
  [[nodiscard]] static std::optional<SocketAddress> fromWireText(const std::string& text);

  [[nodiscard]] bool isLoopback() const noexcept;
  [[nodiscard]] bool isLinkLocal() const noexcept;
  /// 0.0.0.0 or ::
  [[nodiscard]] bool isUnspecified() const noexcept;
  /// Same family and address; port and scope do not count. Unix sockets: the same name.
  [[nodiscard]] bool sameIp(const SocketAddress& other) const noexcept;
  friend bool operator==(const SocketAddress& a, const SocketAddress& b) noexcept {
    return a.sameIp(b) && a.port() == b.port() && a.scopeId() == b.scopeId();
  }
  friend bool operator!=(const SocketAddress& a, const SocketAddress& b) noexcept {
    return !(a == b);
  }

  /// For bind() and connect().
  [[nodiscard]] const sockaddr* raw() const noexcept {
    return reinterpret_cast<const sockaddr*>(&storage_);
  }
  [[nodiscard]] socklen_t rawLength() const noexcept;

 private:
  sockaddr_storage storage_{};
  AddressFamily family_ = AddressFamily::Any;
};

/// All addresses of a host name or literal, in getaddrinfo's order of preference, without duplicates. Blocks as long as
/// the resolver does. Throws Error(ConnectFailed) naming the host and the resolver's reason.
[[nodiscard]] std::vector<SocketAddress> resolve(
    const std::string& host,
    uint16_t port = 0,
    AddressFamily family = AddressFamily::Any);

} // namespace pycomm
