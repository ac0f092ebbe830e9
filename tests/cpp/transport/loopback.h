#pragma once

#include "transport/net/address.h"

namespace pycomm::testing {

inline const SocketAddress kLoopback = SocketAddress::loopback(AddressFamily::IPv4);

} // namespace pycomm::testing
