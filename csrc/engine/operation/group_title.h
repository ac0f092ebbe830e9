#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

namespace pycomm {

/// What a group's users call it. torch tells this only after the group was made, so the copies of a GroupIdentity and the flight log share it. Any thread;
/// without a lock, as a child of fork() asks for it, too.
class GroupTitle final {
 public:
  GroupTitle() = default;
  GroupTitle(const GroupTitle&) = delete;
  GroupTitle& operator=(const GroupTitle&) = delete;
  ~GroupTitle() {
    delete title_.load(std::memory_order_relaxed);
  }

  /// The first one stays.
  void set(std::string title) {
    auto made = std::make_unique<const std::string>(std::move(title));
    const std::string* none = nullptr;
    if (title_.compare_exchange_strong(none, made.get(), std::memory_order_acq_rel)) {
      (void)made.release();
    }
  }
  /// Empty: it has no title, or not yet.
  [[nodiscard]] std::string get() const {
    const std::string* const title = title_.load(std::memory_order_acquire);
    return title == nullptr ? std::string() : *title;
  }

 private:
  std::atomic<const std::string*> title_{nullptr}; ///< this owns it
};

} // namespace pycomm
