#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "host_device.h"

namespace pycomm::cuda::testing {

/// Host memory with CUDA's order of things: a thread a stream, which does what was put onto the stream one after the
/// other, each copy a little late; nothing but events orders two streams. What forgets to wait reads old bytes.
class AsyncDevice : public HostDevice {
 public:
  explicit AsyncDevice(std::chrono::microseconds lateness) : lateness_(lateness) {}
  ~AsyncDevice() override {
    for (auto& [stream, worker] : workers_) {
      worker->stop();
    }
  }

  void copy(void* dst, const void* src, size_t nbytes, Stream stream) override {
    put(stream, [=] {
      std::this_thread::sleep_for(lateness_);
      std::memmove(dst, src, nbytes);
    });
  }
  Event createEvent() override {
    return new std::shared_ptr<Flag>();
  }
  void destroyEvent(Event event) noexcept override {
    delete static_cast<std::shared_ptr<Flag>*>(event);
  }
  void record(Event event, Stream stream) override {
    auto flag = std::make_shared<Flag>();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      *static_cast<std::shared_ptr<Flag>*>(event) = flag;
    }
    put(stream, [flag] { flag->raise(); });
  }
  void streamWait(Stream stream, Event event) override {
    if (const auto flag = flagOf(event)) {
      put(stream, [flag] { flag->wait(); });
    }
  }
  bool eventDone(Event event) override {
    const auto flag = flagOf(event);
    return flag == nullptr || flag->raised();
  }
  void waitEvent(Event event) override {
    if (const auto flag = flagOf(event)) {
      flag->wait();
    }
  }
  /// Does `task` when the stream has come to it.
  void run(Stream stream, std::function<void()> task) {
    put(stream, std::move(task));
  }
  /// Until everything put onto the stream so far has been done.
  void synchronize(Stream stream) {
    const auto flag = std::make_shared<Flag>();
    put(stream, [flag] { flag->raise(); });
    flag->wait();
  }

 private:
  class Flag {
   public:
    void raise() {
      const std::lock_guard<std::mutex> lock(mutex_);
      raised_ = true;
      changed_.notify_all();
    }
    void wait() {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return raised_; });
    }
    bool raised() {
      const std::lock_guard<std::mutex> lock(mutex_);
      return raised_;
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool raised_ = false;
  };

  class Worker {
   public:
    Worker() : thread_([this] { run(); }) {}
    void put(std::function<void()> task) {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
      changed_.notify_all();
    }
    void stop() {
      put({});
      thread_.join();
    }

   private:
    void run() {
      for (;;) {
        std::function<void()> task;
        {
          std::unique_lock<std::mutex> lock(mutex_);
          changed_.wait(lock, [&] { return !tasks_.empty(); });
          task = std::move(tasks_.front());
          tasks_.pop_front();
        }
        if (!task) {
          return;
        }
        task();
      }
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;
    std::thread thread_;
  };

  std::shared_ptr<Flag> flagOf(Event event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return *static_cast<std::shared_ptr<Flag>*>(event);
  }
  void put(Stream stream, std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& worker = workers_[stream];
    if (worker == nullptr) {
      worker = std::make_unique<Worker>();
    }
    worker->put(std::move(task));
  }

  const std::chrono::microseconds lateness_;
  std::mutex mutex_; ///< guards workers_ and what events point at
  std::map<Stream, std::unique_ptr<Worker>> workers_;
};

} // namespace pycomm::cuda::testing
