#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "base/error.h"
#include "transport/rendezvous/store.h"

namespace pycomm::testing {

/// A Store for ranks that are threads of one test.
class MemoryStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++calls_;
    values_[key] = value;
    changed_.notify_all();
  }

  [[nodiscard]] std::string get(const std::string& key, Deadline deadline) override {
    std::unique_lock<std::mutex> lock(mutex_);
    ++calls_;
    const auto there = [&] { return values_.count(key) != 0; };
    // A far limit instead of none: time_point::max() overflows inside wait_until.
    const TimePoint limit = std::min(deadline.instant(), Clock::now() + std::chrono::hours(1));
    if (!changed_.wait_until(lock, limit, there)) {
      throw Error(ErrorCode::RendezvousTimeout, "key " + key + " did not appear");
    }
    return values_[key];
  }

  [[nodiscard]] bool has(const std::string& key) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++calls_;
    return values_.count(key) != 0;
  }

  [[nodiscard]] int64_t add(const std::string& key, int64_t amount) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++calls_;
    return counters_[key] += amount;
  }

  bool remove(const std::string& key) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++calls_;
    return values_.erase(key) + counters_.erase(key) > 0;
  }

  [[nodiscard]] std::map<std::string, std::string> values() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return values_;
  }
  [[nodiscard]] int64_t calls() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }

 private:
  mutable std::mutex mutex_; ///< guards everything below
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::map<std::string, int64_t> counters_;
  int64_t calls_ = 0;
};

} // namespace pycomm::testing
