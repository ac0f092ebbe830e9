#include "ddp/gradient_order.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

namespace pycomm {

std::vector<size_t> GradientOrder::seen(const std::vector<size_t>& expected) const {
  std::vector<size_t> seen;
  std::vector<bool> listed(expected.size(), false);
  for (size_t i = came_.size(); i-- > 0;) {
    if (!listed[came_[i]]) {
      listed[came_[i]] = true;
      seen.push_back(came_[i]);
    }
  }
  std::reverse(seen.begin(), seen.end());
  std::copy_if(
      expected.begin(), expected.end(), std::back_inserter(seen), [&](size_t param) { return !listed[param]; });
  return seen;
}

void checkOrder(std::vector<size_t> order, size_t count) {
  std::sort(order.begin(), order.end());
  for (size_t param = 0; param < count; ++param) {
    TORCH_CHECK(
        order.size() == count && order[param] == param,
        "rank 0 sent an invalid order of buckets: it is not a permutation of the parameters");
  }
}

} // namespace pycomm
