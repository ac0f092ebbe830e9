#include "transport/rendezvous/address_round.h"

#include <algorithm>

#include "base/error.h"

namespace pycomm {
namespace {

constexpr const char* kNoPort = "unix"; // instead of the addresses of a rank that has bound no port

bool isWithoutPort(const std::string& text) {
  return text == kNoPort;
}

[[noreturn]] void refuse(const std::string& who) {
  throw Error(
      ErrorCode::ProtocolViolation,
      "the store holds an address of " + who + " that no pycomm wrote",
      "is the store shared with another program?");
}

// Separated by spaces; none of a rank without a port.
std::vector<SocketAddress> addressesIn(const std::string& text, const std::string& who) {
  std::vector<SocketAddress> addresses;
  size_t begin = 0;
  while (!isWithoutPort(text) && begin <= text.size()) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const auto address = SocketAddress::fromWireText(text.substr(begin, end - begin));
    if (!address || address->port() == 0 || address->isUnspecified() || addresses.size() == kMaxAddresses) {
      refuse(who);
    }
    addresses.push_back(*address);
    begin = end + 1;
  }
  return addresses;
}

} // namespace

std::vector<std::vector<SocketAddress>> exchangeAddresses(
    const StoreRound& round,
    const std::vector<RankRecord>& records,
    bool needs_port,
    const std::function<std::string()>& bind) {
  const auto name = [&](int rank, const std::string&) { return records[static_cast<size_t>(rank)].who(); };
  const auto readAddresses = [&](int rank, const std::string& text) { return addressesIn(text, round.job.text(rank)); };
  std::string mine = needs_port ? bind() : kNoPort;
  std::vector<std::string> texts = round.gather("address", mine, readAddresses, name);
  const auto without = std::count_if(texts.begin(), texts.end(), isWithoutPort);
  const bool some = without > 0 && static_cast<size_t>(without) < texts.size();
  if (some) {
    mine = needs_port ? mine : bind();
    texts = round.gather("port", mine, readAddresses, name);
  }
  std::vector<std::vector<SocketAddress>> addresses;
  for (const std::string& text : texts) {
    const auto rank = static_cast<int>(addresses.size());
    if (isWithoutPort(text) && (some || needs_port)) {
      refuse(round.job.text(rank));
    }
    addresses.push_back(readAddresses(rank, text));
  }
  return addresses;
}

} // namespace pycomm
