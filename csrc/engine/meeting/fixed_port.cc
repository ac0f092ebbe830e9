#include "engine/meeting/fixed_port.h"

#include <algorithm>

#include "base/abort_token.h"
#include "transport/net/interfaces.h"
#include "transport/net/name_lookup.h"

namespace pycomm {

std::vector<SocketAddress> FixedPort::addressesOf(const std::string& host, Deadline deadline) const {
  const AbortToken none;
  std::vector<SocketAddress> addresses = nameLookups().find(host, deadline, none);
  for (SocketAddress& address : addresses) {
    address = address.withPort(port);
  }
  return addresses;
}

std::vector<SocketAddress> FixedPort::addressesHere(const MemberHandle& self, Deadline deadline) const {
  const std::vector<Interface> interfaces = listInterfaces();
  const auto isHere = [&](const SocketAddress& address) { // all of 127.0.0.0/8, of which interfaces have one
    const bool loopback = address.isLoopback() && address.family() == AddressFamily::IPv4;
    return loopback || std::any_of(interfaces.begin(), interfaces.end(), [&](const Interface& interface) {
             return std::any_of(interface.addresses.begin(), interface.addresses.end(), [&](const SocketAddress& own) {
               return own.sameIp(address);
             });
           });
  };
  std::vector<SocketAddress> here;
  const auto add = [&](const SocketAddress& address) {
    if (std::find(here.begin(), here.end(), address) == here.end()) {
      here.push_back(address);
    }
  };
  for (const std::string& host : hosts) {
    for (const SocketAddress& address : addressesOf(host, deadline)) {
      if (isHere(address)) {
        add(address);
      }
    }
  }
  if (!here.empty()) {
    for (const SocketAddress& address : self.addresses) {
      add(address.withPort(port));
    }
  }
  return here;
}

MemberHandle FixedPort::listenerAt(const SocketAddress& address, const MemberHandle& self) {
  MemberHandle listener;
  listener.endpoint = kProcess;
  listener.nonce = kNonce;
  listener.key_id = self.key_id;
  listener.host = self.host; // so that no address is passed over: see waysTo()
  listener.addresses = {address};
  return listener;
}

} // namespace pycomm
