#pragma once

#include <mutex>
#include <string>
#include <utility>

namespace pycomm {

/// What a group's users call it. torch tells this only after the group was made, so the copies of a GroupIdentity share it. Any thread.
class GroupTitle final {
 public:
  void set(std::string title) {
    const std::lock_guard<std::mutex> lock(mutex_);
    title_ = std::move(title);
  }
  /// Empty: it has no title, or not yet.
  [[nodiscard]] std::string get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return title_;
  }

 private:
  mutable std::mutex mutex_; ///< guards title_
  std::string title_;
};

} // namespace pycomm
