#include "transport/net/address.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string_view>

#include "base/error.h"
#include "base/printable.h"
#include "transport/random_bytes.h"

namespace pycomm {
namespace {

constexpr size_t kMaxAddressTextNbytes = 64; // "[" + 39 digits and colons + "]:65535" fits

const sockaddr_in& asIPv4(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr_in&>(storage);
}
sockaddr_in& asIPv4(sockaddr_storage& storage) {
  return reinterpret_cast<sockaddr_in&>(storage);
}
const sockaddr_in6& asIPv6(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr_in6&>(storage);
}
sockaddr_in6& asIPv6(sockaddr_storage& storage) {
  return reinterpret_cast<sockaddr_in6&>(storage);
}

constexpr const char* kUnixPrefix = "pycomm/";

const sockaddr_un& asUnix(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr_un&>(storage);
}

// After the NUL that marks the abstract namespace. The names of pycomm have no other NUL.
std::string_view abstractName(const sockaddr_storage& storage) noexcept {
  const char* path = asUnix(storage).sun_path;
  const size_t room = sizeof asUnix(storage).sun_path - 1;
  return path[0] == '\0' ? std::string_view(path + 1, ::strnlen(path + 1, room)) : std::string_view();
}

// Decimal digits only, at most `limit`; -1 for anything else. strtol would also take signs and spaces.
int64_t parseDecimal(const std::string& text, int64_t limit) {
  if (text.empty() || text.size() > 10) {
    return -1;
  }
  int64_t value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') {
      return -1;
    }
    value = value * 10 + (c - '0');
  }
  return value <= limit ? value : -1;
}

uint32_t parseScope(const std::string& scope) {
  const uint32_t index = ::if_nametoindex(scope.c_str());
  if (index != 0) {
    return index;
  }
  const int64_t number = parseDecimal(scope, UINT32_MAX);
  return number > 0 ? static_cast<uint32_t>(number) : 0;
}

} // namespace

const char* addressFamilyName(AddressFamily family) noexcept {
  switch (family) {
    case AddressFamily::Any:
      return "any";
    case AddressFamily::Unix:
      return "Unix";
    case AddressFamily::IPv4:
      return "IPv4";
    case AddressFamily::IPv6:
      return "IPv6";
  }
  return "unknown";
}

SocketAddress SocketAddress::fromSockaddr(const sockaddr* address, socklen_t length) {
  SocketAddress result;
  if (address == nullptr) {
    return result;
  }
  if (address->sa_family == AF_INET && length >= sizeof(sockaddr_in)) {
    std::memcpy(&result.storage_, address, sizeof(sockaddr_in));
    result.family_ = AddressFamily::IPv4;
  } else if (address->sa_family == AF_INET6 && length >= sizeof(sockaddr_in6)) {
    std::memcpy(&result.storage_, address, sizeof(sockaddr_in6));
    result.family_ = AddressFamily::IPv6;
    const sockaddr_in6 v6 = asIPv6(result.storage_);
    if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
      result.storage_ = {};
      sockaddr_in& v4 = asIPv4(result.storage_);
      v4.sin_family = AF_INET;
      v4.sin_port = v6.sin6_port;
      std::memcpy(&v4.sin_addr, v6.sin6_addr.s6_addr + 12, sizeof v4.sin_addr);
      result.family_ = AddressFamily::IPv4;
    }
  } else if (address->sa_family == AF_UNIX) {
    std::memcpy(&result.storage_, address, std::min(static_cast<size_t>(length), sizeof(sockaddr_un)));
    result.family_ = AddressFamily::Unix;
  }
  return result;
}

std::string randomUnixName() {
  std::array<char, 17> name{};
  (void)std::snprintf(name.data(), name.size(), "%016llx", static_cast<unsigned long long>(randomNumber()));
  return name.data();
}

SocketAddress SocketAddress::unixSocket(const std::string& name) {
  if (name.empty() || name.size() > kMaxUnixName || name.find('\0') != std::string::npos) {
    throw Error(ErrorCode::InvalidArgument, "a Unix socket cannot have this name");
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = kUnixPrefix + name;
  static_assert(kMaxUnixName + 16 < sizeof address.sun_path);
  std::memcpy(address.sun_path + 1, path.data(), path.size());
  return fromSockaddr(reinterpret_cast<const sockaddr*>(&address), sizeof address);
}

std::optional<SocketAddress> SocketAddress::tryParse(const std::string& ip, uint16_t port) {
  std::string literal = ip;
  if (literal.size() >= 2 && literal.front() == '[' && literal.back() == ']') {
    literal = literal.substr(1, literal.size() - 2);
  }
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(port);
  if (::inet_pton(AF_INET, literal.c_str(), &v4.sin_addr) == 1) {
    return fromSockaddr(reinterpret_cast<const sockaddr*>(&v4), sizeof v4);
  }
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(port);
  const size_t percent = literal.find('%');
  if (percent != std::string::npos) {
    v6.sin6_scope_id = parseScope(literal.substr(percent + 1));
    if (v6.sin6_scope_id == 0) {
      return std::nullopt;
    }
    literal.resize(percent);
  }
  if (::inet_pton(AF_INET6, literal.c_str(), &v6.sin6_addr) == 1) {
    return fromSockaddr(reinterpret_cast<const sockaddr*>(&v6), sizeof v6);
  }
  return std::nullopt;
}

SocketAddress SocketAddress::parse(const std::string& ip, uint16_t port) {
  if (const auto address = tryParse(ip, port)) {
    return *address;
  }
  throw Error(
      ErrorCode::InvalidArgument, "\"" + ip + "\" is not an IPv4 or IPv6 address", "10.0.0.1, fd00::1 or fe80::1%eth0");
}

SocketAddress SocketAddress::loopback(AddressFamily family, uint16_t port) {
  return parse(family == AddressFamily::IPv6 ? "::1" : "127.0.0.1", port);
}

uint16_t SocketAddress::port() const noexcept {
  switch (family_) {
    case AddressFamily::Any:
    case AddressFamily::Unix:
      return 0;
    case AddressFamily::IPv4:
      return ntohs(asIPv4(storage_).sin_port);
    case AddressFamily::IPv6:
      return ntohs(asIPv6(storage_).sin6_port);
  }
  return 0;
}

SocketAddress SocketAddress::withPort(uint16_t port) const {
  SocketAddress result = *this;
  if (family_ == AddressFamily::IPv4) {
    asIPv4(result.storage_).sin_port = htons(port);
  } else if (family_ == AddressFamily::IPv6) {
    asIPv6(result.storage_).sin6_port = htons(port);
  }
  return result;
}

uint32_t SocketAddress::scopeId() const noexcept {
  return family_ == AddressFamily::IPv6 ? asIPv6(storage_).sin6_scope_id : 0;
}

SocketAddress SocketAddress::withScopeId(uint32_t scope_id) const {
  SocketAddress result = *this;
  if (family_ == AddressFamily::IPv6) {
    asIPv6(result.storage_).sin6_scope_id = scope_id;
  }
  return result;
}

std::string SocketAddress::ip() const {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (family_ == AddressFamily::IPv4) {
    ::inet_ntop(AF_INET, &asIPv4(storage_).sin_addr, text.data(), text.size());
    return text.data();
  }
  if (family_ == AddressFamily::IPv6) {
    ::inet_ntop(AF_INET6, &asIPv6(storage_).sin6_addr, text.data(), text.size());
    std::string out = text.data();
    if (scopeId() != 0) {
      std::array<char, IF_NAMESIZE> name{};
      const bool named = ::if_indextoname(scopeId(), name.data()) != nullptr;
      out += "%" + (named ? std::string(name.data()) : std::to_string(scopeId()));
    }
    return out;
  }
  return "";
}

std::string SocketAddress::text() const {
  if (empty()) {
    return "(none)";
  }
  if (isUnix()) {
    const std::string name(abstractName(storage_));
    return name.empty() ? "unix" : "unix:" + printable(name, kMaxUnixName + 16);
  }
  const std::string host = family_ == AddressFamily::IPv6 ? "[" + ip() + "]" : ip();
  return host + ":" + std::to_string(port());
}

std::string SocketAddress::wireText() const {
  return withScopeId(0).text();
}

std::optional<SocketAddress> SocketAddress::fromWireText(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (text.size() > kMaxAddressTextNbytes || colon == std::string::npos || text.find('\0') != std::string::npos) {
    return std::nullopt;
  }
  const int64_t port = parseDecimal(text.substr(colon + 1), 65535);
  const std::string host = text.substr(0, colon);
  const bool bracketed = host.size() >= 2 && host.front() == '[' && host.back() == ']';
  const bool has_colon = host.find(':') != std::string::npos;
  if (port < 0 || host.find('%') != std::string::npos || bracketed != has_colon) {
    return std::nullopt;
  }
  return tryParse(host, static_cast<uint16_t>(port));
}

bool SocketAddress::isLoopback() const noexcept {
  switch (family_) {
    case AddressFamily::Any:
    case AddressFamily::Unix:
      return false;
    case AddressFamily::IPv4:
      return ntohl(asIPv4(storage_).sin_addr.s_addr) >> 24 == 127;
    case AddressFamily::IPv6:
      return IN6_IS_ADDR_LOOPBACK(&asIPv6(storage_).sin6_addr);
  }
  return false;
}

bool SocketAddress::isLinkLocal() const noexcept {
  switch (family_) {
    case AddressFamily::Any:
    case AddressFamily::Unix:
      return false;
    case AddressFamily::IPv4:
      return ntohl(asIPv4(storage_).sin_addr.s_addr) >> 16 == 0xA9FE; // 169.254/16, RFC 3927
    case AddressFamily::IPv6:
      return IN6_IS_ADDR_LINKLOCAL(&asIPv6(storage_).sin6_addr);
  }
  return false;
}

bool SocketAddress::isUnspecified() const noexcept {
  switch (family_) {
    case AddressFamily::Any:
    case AddressFamily::Unix:
      return false;
    case AddressFamily::IPv4:
      return asIPv4(storage_).sin_addr.s_addr == htonl(INADDR_ANY);
    case AddressFamily::IPv6:
      return IN6_IS_ADDR_UNSPECIFIED(&asIPv6(storage_).sin6_addr);
  }
  return false;
}

bool SocketAddress::sameIp(const SocketAddress& other) const noexcept {
  if (family_ != other.family_) {
    return false;
  }
  switch (family_) {
    case AddressFamily::Any:
      return true;
    case AddressFamily::Unix:
      return abstractName(storage_) == abstractName(other.storage_);
    case AddressFamily::IPv4:
      return asIPv4(storage_).sin_addr.s_addr == asIPv4(other.storage_).sin_addr.s_addr;
    case AddressFamily::IPv6:
      return std::memcmp(&asIPv6(storage_).sin6_addr, &asIPv6(other.storage_).sin6_addr, sizeof(in6_addr)) == 0;
  }
  return false;
}

socklen_t SocketAddress::rawLength() const noexcept {
  switch (family_) {
    case AddressFamily::Any:
      return 0;
    case AddressFamily::Unix:
      return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + abstractName(storage_).size());
    case AddressFamily::IPv4:
      return sizeof(sockaddr_in);
    case AddressFamily::IPv6:
      return sizeof(sockaddr_in6);
  }
  return 0;
}

std::vector<SocketAddress> resolve(const std::string& host, uint16_t port, AddressFamily family) {
  if (const auto literal = SocketAddress::tryParse(host, port)) {
    if (family == AddressFamily::Any || family == literal->family()) {
      return {*literal};
    }
  }
  addrinfo wanted{};
  wanted.ai_family = family == AddressFamily::IPv4 ? AF_INET : (family == AddressFamily::IPv6 ? AF_INET6 : AF_UNSPEC);
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(host.c_str(), nullptr, &wanted, &found);
  const int error_number = errno;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* entry = found; status == 0 && entry != nullptr; entry = entry->ai_next) {
    const SocketAddress address = SocketAddress::fromSockaddr(entry->ai_addr, entry->ai_addrlen).withPort(port);
    if (!address.empty() && std::find(addresses.begin(), addresses.end(), address) == addresses.end()) {
      addresses.push_back(address);
    }
  }
  if (!addresses.empty()) {
    return addresses;
  }
  ErrorRecord record;
  record.code = ErrorCode::ConnectFailed;
  record.summary = "host \"" + host + "\" has no " +
      (family == AddressFamily::Any ? std::string() : std::string(addressFamilyName(family)) + " ") + "address";
  record.cause = status == EAI_SYSTEM ? errnoText(error_number) : ::gai_strerror(status == 0 ? EAI_NONAME : status);
  record.phase = ErrorPhase::Resolve;
  record.hint = "check the name with `getent hosts " + host + "`, or use the address itself";
  throw Error(record);
}

} // namespace pycomm
