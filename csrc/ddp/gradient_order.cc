#include "ddp/gradient_order.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace pycomm {

GradientOrder::GradientOrder(size_t param_count) {
  for (size_t param = param_count; param-- > 0;) {
    expected_.push_back(param);
  }
}

void GradientOrder::came(size_t param) {
  came_.push_back(param);
}

std::vector<size_t> GradientOrder::seen() const {
  std::vector<size_t> seen;
  std::vector<bool> listed(expected_.size(), false);
  for (size_t i = came_.size(); i-- > 0;) {
    if (!listed[came_[i]]) {
      listed[came_[i]] = true;
      seen.push_back(came_[i]);
    }
  }
  std::reverse(seen.begin(), seen.end());
  std::copy_if(
      expected_.begin(), expected_.end(), std::back_inserter(seen), [&](size_t param) { return !listed[param]; });
  return seen;
}

void GradientOrder::agree(std::vector<size_t> order) {
  std::vector<size_t> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  for (size_t param = 0; param < expected_.size(); ++param) {
    TORCH_CHECK(
        sorted.size() == expected_.size() && sorted[param] == param,
        "rank 0 sent an invalid order of buckets: it is not a permutation of the parameters");
  }
  expected_ = std::move(order);
  came_.clear();
  agreed_ = true;
}

} // namespace pycomm
