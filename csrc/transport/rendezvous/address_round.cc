#include "transport/rendezvous/address_round.h"

#include <algorithm>

#include "base/error.h"

namespace pycomm {
namespace {

constexpr const char* kNoPort = "unix"; // instead of the address of a rank that has bound no port

bool isWithoutPort(const std::string& text) {
  return text == kNoPort;
}

[[noreturn]] void refuse(const std::string& who) {
  throw Error(
      ErrorCode::ProtocolViolation,
      "the store holds an address of " + who + " that no pycomm wrote",
      "is the store shared with another program?");
}

// Empty for a rank without a port.
SocketAddress addressIn(const std::string& text, const std::string& who) {
  if (isWithoutPort(text)) {
    return {};
  }
  const auto address = SocketAddress::fromWireText(text);
  if (!address || address->port() == 0 || address->isUnspecified()) {
    refuse(who);
  }
  return *address;
}

} // namespace

std::vector<SocketAddress> exchangeAddresses(
    const StoreRound& round,
    const std::vector<RankRecord>& records,
    bool needs_port,
    const std::function<std::string()>& bind) {
  const auto name = [&](int rank, const std::string&) { return records[static_cast<size_t>(rank)].who(); };
  const auto readAddress = [&](int rank, const std::string& text) { return addressIn(text, round.job.text(rank)); };
  std::string mine = needs_port ? bind() : kNoPort;
  std::vector<std::string> texts = round.gather("address", mine, readAddress, name);
  const auto without = std::count_if(texts.begin(), texts.end(), isWithoutPort);
  const bool some = without > 0 && static_cast<size_t>(without) < texts.size();
  if (some) {
    mine = needs_port ? mine : bind();
    texts = round.gather("port", mine, readAddress, name);
  }
  std::vector<SocketAddress> addresses;
  for (const std::string& text : texts) {
    const auto rank = static_cast<int>(addresses.size());
    if (isWithoutPort(text) && (some || needs_port)) {
      refuse(round.job.text(rank));
    }
    addresses.push_back(readAddress(rank, text));
  }
  return addresses;
}

} // namespace pycomm
