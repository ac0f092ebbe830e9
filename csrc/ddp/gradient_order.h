#pragma once

#include <cstddef>
#include <vector>

namespace pycomm {

/// The order in which gradients are expected, and the order in which those of the first reduction came.
///
/// The first expectation is the reverse order of registration: backward reaches the last registered parameters first, more or less.
class GradientOrder {
 public:
  explicit GradientOrder(size_t param_count);

  /// All parameters.
  [[nodiscard]] const std::vector<size_t>& expected() const noexcept {
    return expected_;
  }
  /// A gradient of the first reduction came. May be called several times for one parameter.
  void came(size_t param);
  /// The first reduction is over: the order can be agreed on.
  void close() noexcept {
    open_ = false;
  }
  [[nodiscard]] bool open() const noexcept {
    return open_;
  }

  /// expected() in the order of came(): the last time counts. Parameters without a gradient (frozen, or this rank had no
  /// data) go to the end in their present order.
  [[nodiscard]] std::vector<size_t> seen() const;
  /// All ranks expect this order from now on. Throws unless it is a permutation of all parameters.
  void agree(std::vector<size_t> order);
  [[nodiscard]] bool agreed() const noexcept {
    return agreed_;
  }

 private:
  std::vector<size_t> expected_;
  std::vector<size_t> came_;
  bool open_ = true;
  bool agreed_ = false;
};

} // namespace pycomm
