#include "ddp/bucket_plan.h"

#include <algorithm>
#include <map>
#include <utility>

namespace pycomm {
namespace {

/// A bucket, and when it will be complete: the place of its last member in the order.
using Planned = std::pair<size_t, std::vector<size_t>>;

/// One kind: `places` are its members' places in `order`, ascending.
void planKind(
    const std::vector<size_t>& places,
    const std::vector<size_t>& order,
    const std::vector<BucketMember>& members,
    const BucketCaps& caps,
    std::vector<Planned>& planned) {
  const auto nbytes = [&](size_t i) { return members[order[places[i]]].nbytes; };
  size_t tail = places.size(); // the last bucket begins here
  for (size_t sum = 0; caps.last_nbytes > 0 && tail > 0; --tail) {
    sum += nbytes(tail - 1);
    if (sum > caps.last_nbytes && tail < places.size()) {
      break;
    }
  }
  Planned open;
  size_t filled = 0;
  size_t closed = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    open.first = places[i];
    open.second.push_back(order[places[i]]);
    filled += nbytes(i);
    const size_t cap = caps.nbytes[std::min(closed, caps.nbytes.size() - 1)];
    const bool full = i < tail && filled >= cap;
    if (full || i + 1 == tail || i + 1 == places.size()) {
      planned.push_back(std::exchange(open, {}));
      filled = 0;
      ++closed;
    }
  }
}

} // namespace

std::vector<std::vector<size_t>> planBuckets(
    const std::vector<size_t>& order,
    const std::vector<BucketMember>& members,
    const BucketCaps& caps) {
  std::map<int, std::vector<size_t>> kinds;
  std::vector<Planned> planned;
  for (size_t place = 0; place < order.size(); ++place) {
    const BucketMember& member = members[order[place]];
    if (member.alone) {
      planned.push_back({place, {order[place]}});
    } else {
      kinds[member.kind].push_back(place);
    }
  }
  for (const auto& [kind, places] : kinds) {
    planKind(places, order, members, caps, planned);
  }
  std::sort(planned.begin(), planned.end(), [](const Planned& a, const Planned& b) { return a.first < b.first; });
  std::vector<std::vector<size_t>> buckets;
  buckets.reserve(planned.size());
  for (Planned& bucket : planned) {
    buckets.push_back(std::move(bucket.second));
  }
  return buckets;
}

} // namespace pycomm
