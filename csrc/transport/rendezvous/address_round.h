#pragma once

#include <functional>
#include <string>
#include <vector>

#include "transport/net/address.h"
#include "transport/rendezvous/rank_record.h"
#include "transport/rendezvous/store_round.h"

namespace pycomm {

/// The second round of a rendezvous, and the third if there is one: exchanges where the ranks listen. Returns the address of each rank;
/// all are empty if all ranks reach each other by Unix sockets. `bind` binds the port of this rank and returns its address as text; it is called
/// once if this rank `needs_port` or any other does. Throws what gather() and `bind` throw, and Error(ProtocolViolation) for what no pycomm
/// wrote.
[[nodiscard]] std::vector<SocketAddress> exchangeAddresses(
    const StoreRound& round,
    const std::vector<RankRecord>& records,
    bool needs_port,
    const std::function<std::string()>& bind);

} // namespace pycomm
