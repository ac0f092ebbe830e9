#pragma once

#include <cstddef>
#include <vector>

namespace pycomm {

/// The order in which gradients are expected, and the one in which those of the first reduction came.
///
/// Expected at first is the reverse order of registration: backward comes to the last registered parameter first, more or less.
class GradientOrder {
 public:
  explicit GradientOrder(size_t param_count);

  /// All parameters.
  [[nodiscard]] const std::vector<size_t>& expected() const noexcept {
    return expected_;
  }
  /// A gradient of the first reduction came. May be called several times for one parameter.
  void came(size_t param);
  void forget();
  /// The first reduction is over: the order can be agreed on.
  void close() noexcept {
    open_ = false;
  }
  [[nodiscard]] bool open() const noexcept {
    return open_;
  }

  /// expected() in the order of came(): the last time counts. Parameters that did not come, because they are frozen or this rank had
  /// no data, go to the end as they stood.
  [[nodiscard]] std::vector<size_t> seen() const;
  /// What all ranks go by from now on. Throws unless it is a permutation of all parameters.
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
