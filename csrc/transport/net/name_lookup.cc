#include "transport/net/name_lookup.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/native_thread.h"

namespace pycomm {
namespace {

constexpr std::chrono::seconds kLongestLookup{30}; // three name servers, two tries of 5 s each

TimePoint endOfWait(Deadline deadline) {
  const TimePoint now = Clock::now();
  const auto left = std::max(deadline.instant() - now, Clock::duration::zero());
  return now + std::min<Clock::duration>(left / 2, kLongestLookup);
}

} // namespace

NameLookups::NameLookups(Resolver resolver) : resolver_(std::move(resolver)) {}

std::vector<SocketAddress> NameLookups::find(const std::string& host, Deadline deadline, const AbortToken& abort) {
  if (const auto literal = SocketAddress::tryParse(host, 0)) {
    return {*literal};
  }
  const TimePoint end = endOfWait(deadline);
  std::unique_lock<std::mutex> lock(shared_->mutex);
  if (shared_->by_host.count(host) == 0) {
    shared_->by_host[host] = Lookup();
    try {
      startNativeThread("pycomm-resolve", [shared = shared_, resolver = resolver_, host] {
        std::vector<SocketAddress> addresses;
        try {
          addresses = resolver(host);
        } catch (const std::exception&) { // none
        }
        const std::lock_guard<std::mutex> answer(shared->mutex);
        const auto place = shared->by_host.find(host);
        place->second.answered = true;
        place->second.addresses = std::move(addresses);
        shared->changed.notify_all();
      }).detach();
    } catch (const std::exception&) { // no thread: without the name there is only one hint less
      shared_->by_host.erase(host);
      return {};
    }
  }
  for (;;) {
    const auto place = shared_->by_host.find(host);
    if (place == shared_->by_host.end()) { // it was answered, and somebody else has taken note that it has no address
      return {};
    }
    Lookup& lookup = place->second;
    if (lookup.answered) {
      const std::vector<SocketAddress> addresses = lookup.addresses;
      if (addresses.empty()) {
        shared_->by_host.erase(place);
      }
      return addresses;
    }
    abort.throwIfAborted();
    if (lookup.given_up) {
      return {};
    }
    if (Clock::now() >= end) {
      lookup.given_up = true;
      break;
    }
    shared_->changed.wait_until(lock, std::min(end, Clock::now() + std::chrono::milliseconds(kAbortSliceMs)));
  }
  lock.unlock();
  log(LogLevel::Warn,
      "no name server has answered yet what the address of \"" + host +
          "\" is, so this rank goes on without it. Try: getent hosts " + host + "; or set PYCOMM_SOCKET_IFNAME");
  return {};
}

NameLookups& nameLookups() {
  static NameLookups& lookups = *new NameLookups();
  return lookups;
}

} // namespace pycomm
