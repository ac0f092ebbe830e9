#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "engine/group.h"
#include "transport/rendezvous/sealed_store.h"
#include "views.h"

namespace pycomm::testing {

/// A store that ranks which are threads share.
class SharedStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key, Deadline deadline) override {
    std::unique_lock<std::mutex> lock(mutex_);
    while (values_.count(key) == 0) {
      if (deadline.expired()) {
        throw Error(ErrorCode::RendezvousTimeout, "no key " + key);
      }
      changed_.wait_for(lock, std::chrono::milliseconds(20));
    }
    return values_[key];
  }
  bool has(const std::string& key) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return values_.count(key) != 0;
  }
  int64_t add(const std::string& key, int64_t amount) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t& counter = counters_[key];
    counter += amount;
    values_[key] = std::to_string(counter);
    changed_.notify_all();
    return counter;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::map<std::string, int64_t> counters_;
};

/// What a rank of a test's group has told before it joins.
inline Group::Config groupConfig(int rank, int size, const std::string& name = "test") {
  Group::Config config;
  config.rendezvous.rank = rank;
  config.rendezvous.size = size;
  config.rendezvous.group_name = name;
  config.rendezvous.deadline = Deadline::after(20000);
  config.dead_after_ms = 30000; // no rank counts as silent, however busy the machine is
  return config;
}

/// One rank that is a thread: its own engine and group, as a process would have.
struct Rank {
  int rank = 0;
  int size = 1;
  Engine& engine;
  Group& group;
};

/// After each test: a group that has not failed keeps nothing for operations that have ended. A peer's last frames may be on their way.
inline void expectIdle(Group& group) {
  const Deadline most = Deadline::after(5000);
  std::string held;
  while (!group.failure() && !(held = heldText(group.usage())).empty() && !most.expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(group.failure() || held.empty())
      << "rank " << group.identity().rank << " of an idle group keeps " << held;
}

/// Runs `body` on `size` ranks, each a thread with its own Engine. Rethrows the first exception. No rank begins before all have
/// joined: if a group fails before that, the join of a late rank fails, too.
inline void runRanks(
    int size,
    const std::function<void(Rank&)>& body,
    const std::function<void(Group::Config&)>& adjust = {}) {
  SharedStore store;
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  std::atomic<int> tried{0};
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      bool joined = false;
      try {
        Engine engine;
        Group::Config config = groupConfig(rank, size);
        if (adjust) {
          adjust(config);
        }
        std::optional<SealedStore> sealed;
        if (config.security.secret != nullptr) {
          sealed.emplace(store, *config.security.secret);
        }
        Store& meeting_place = sealed ? static_cast<Store&>(*sealed) : store;
        const std::shared_ptr<Group> group = Group::join(engine, meeting_place, config);
        joined = true;
        for (++tried; tried < size;) {
          std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
        Rank self{rank, size, engine, *group};
        body(self);
        expectIdle(*group);
        group->close();
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
        tried += joined ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::exception_ptr& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

/// Waits until `size` ranks are here, 20 s at most: an operation ends on one rank before another.
inline void waitForAll(std::atomic<int>& here, int size) {
  const Deadline most = Deadline::after(20000);
  for (++here; here < size && !most.expired();) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

/// A float32 all_reduce(SUM) in place.
inline Group::Call allReduceCall(std::vector<float>& values, Deadline deadline = Deadline::after(20000)) {
  Group::Call call;
  call.schedule.kind = Collective::AllReduce;
  call.schedule.dtype = DType::Float32;
  call.schedule.reduce_op = ReduceOp::Sum;
  call.schedule.numel = static_cast<int64_t>(values.size());
  call.input = viewOf(values);
  call.output = viewOf(values);
  call.deadline = deadline;
  return call;
}

inline Group::Call barrierCall(Deadline deadline = Deadline::after(20000)) {
  Group::Call call;
  call.schedule.kind = Collective::Barrier;
  call.deadline = deadline;
  return call;
}

} // namespace pycomm::testing
