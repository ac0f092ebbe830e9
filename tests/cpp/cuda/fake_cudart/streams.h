#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>

#include "fake_cudart/device.h"

namespace fake_cuda {

/// The queues of all streams, and the one thread that does what is in them.
class Streams {
 public:
  explicit Streams(uint64_t seed);

  /// `late`: after a pause of some tenths of a millisecond, at times, when it has come to the head.
  void put(uint64_t stream, Task task, bool late);
  /// Until all that is on the stream now has been done.
  void synchronize(uint64_t stream);
  void synchronizeAll();
  uint32_t draw(uint32_t limit);

  std::atomic<bool> broken{false};

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    Task task;
    bool late;
  };
  struct Queue {
    std::deque<Entry> entries;
    Clock::time_point due; ///< of the head
    bool waits = false; ///< the head was not ready in this round
    uint32_t laziness = 0; ///< tenths of a millisecond at most, before what is late
  };
  [[noreturn]] void run();
  void pause(Queue& queue);
  Queue* chooseReady(Clock::time_point now);

  std::mutex mutex_; ///< guards the rest
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::map<uint64_t, Queue> queues_;
};

} // namespace fake_cuda
