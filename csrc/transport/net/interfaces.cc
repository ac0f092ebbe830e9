#include "transport/net/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "base/error.h"

namespace pycomm {
namespace {

bool beginsWith(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

} // namespace

std::vector<Interface> listInterfaces() {
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) {
    throw Error(systemError(ErrorCode::SystemError, "the network interfaces of this host cannot be listed", errno));
  }
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(found, &::freeifaddrs);
  std::vector<Interface> interfaces;
  for (const ifaddrs* entry = found; entry != nullptr; entry = entry->ifa_next) {
    // getifaddrs gives one entry per address, and one of family AF_PACKET for an interface without any.
    const std::string name = entry->ifa_name;
    auto same = std::find_if(interfaces.begin(), interfaces.end(), [&](const Interface& i) { return i.name == name; });
    if (same == interfaces.end()) {
      Interface fresh;
      fresh.name = name;
      fresh.up = (entry->ifa_flags & IFF_UP) != 0;
      fresh.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
      interfaces.push_back(std::move(fresh));
      same = interfaces.end() - 1;
    }
    const SocketAddress address = SocketAddress::fromSockaddr(entry->ifa_addr, sizeof(sockaddr_storage));
    if (!address.empty()) {
      same->addresses.push_back(address.withPort(0));
    }
  }
  return interfaces;
}

std::string describeInterfaces(const std::vector<Interface>& interfaces) {
  std::string out;
  for (const Interface& interface : interfaces) {
    std::string inside = interface.up ? "" : "down";
    for (const SocketAddress& address : interface.addresses) {
      inside += (inside.empty() ? "" : ", ") + address.ip();
    }
    out += (out.empty() ? "" : ", ") + interface.name + " (" + (inside.empty() ? "no address" : inside) + ")";
  }
  return out.empty() ? "none" : out;
}

InterfaceSpec InterfaceSpec::parse(const std::string& text) {
  InterfaceSpec spec;
  std::string rest = trimmed(text);
  if (rest.empty()) {
    return spec;
  }
  if (rest.front() == '^') {
    spec.exclude = true;
    rest = trimmed(rest.substr(1));
  }
  if (!rest.empty() && rest.front() == '=') {
    spec.exact = true;
    rest = trimmed(rest.substr(1));
  }
  size_t begin = 0;
  while (begin <= rest.size()) {
    const size_t comma = std::min(rest.find(',', begin), rest.size());
    const std::string pattern = trimmed(rest.substr(begin, comma - begin));
    if (pattern.empty() || pattern.find_first_of("^= \t") != std::string::npos) {
      throw Error(
          ErrorCode::InvalidArgument,
          "\"" + text + "\" is not a choice of network interfaces",
          "names with commas between (\"eth0,eth1\"), \"=eth0\" for that name only, \"^docker,lo\" for all but these");
    }
    spec.patterns.push_back(pattern);
    begin = comma + 1;
  }
  return spec;
}

bool InterfaceSpec::matches(const std::string& name) const {
  const bool listed = std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    return exact ? name == pattern : beginsWith(name, pattern);
  });
  return empty() || listed != exclude;
}

std::vector<Interface> InterfaceSpec::select(const std::vector<Interface>& interfaces) const {
  std::vector<Interface> chosen;
  const auto take = [&](auto&& wanted) {
    for (const Interface& interface : interfaces) {
      const bool taken = std::any_of(
          chosen.begin(), chosen.end(), [&](const Interface& other) { return other.name == interface.name; });
      if (!taken && matches(interface.name) && wanted(interface.name)) {
        chosen.push_back(interface);
      }
    }
  };
  if (!exclude) {
    for (const std::string& pattern : patterns) {
      take([&](const std::string& name) { return name == pattern; });
      take([&](const std::string& name) { return beginsWith(name, pattern); });
    }
  }
  if (exclude || empty()) {
    take([](const std::string&) { return true; });
  }
  if (chosen.empty()) {
    throw Error(
        ErrorCode::NoInterface,
        "no network interface of this host matches \"" + this->text() + "\"; it has " + describeInterfaces(interfaces),
        "set PYCOMM_SOCKET_IFNAME to one of these, or unset it");
  }
  return chosen;
}

std::string InterfaceSpec::text() const {
  std::string out = std::string(exclude ? "^" : "") + (exact ? "=" : "");
  for (size_t i = 0; i < patterns.size(); ++i) {
    out += (i == 0 ? "" : ",") + patterns[i];
  }
  return out;
}

} // namespace pycomm
