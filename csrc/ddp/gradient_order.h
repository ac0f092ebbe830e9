#pragma once

#include <cstddef>
#include <vector>

namespace pycomm {

/// The order in which the gradients of the first reduction came on this rank. The expected order, which ranks share, is in SharedValues.
class GradientOrder {
 public:
  /// A gradient came. May be called several times for one parameter.
  void came(size_t param) {
    came_.push_back(param);
  }
  void clear() noexcept {
    came_.clear();
  }

  /// `expected` in the order of came(): the last time counts. Parameters without a gradient (frozen, or this rank had no
  /// data) go to the end in their present order.
  [[nodiscard]] std::vector<size_t> seen(const std::vector<size_t>& expected) const;

 private:
  std::vector<size_t> came_;
};

/// Throws unless rank 0's `order` is a permutation of `count` parameters.
void checkOrder(std::vector<size_t> order, size_t count);

} // namespace pycomm
