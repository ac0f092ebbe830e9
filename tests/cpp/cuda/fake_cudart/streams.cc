#include "fake_cudart/streams.h"

#include <pthread.h>

#include <csignal>
#include <thread>
#include <vector>

namespace fake_cuda {
namespace {

constexpr std::chrono::microseconds kLookEvery{200};

} // namespace

Streams::Streams(uint64_t seed) : random_(seed) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([this] { run(); }).detach(); // as long as the process
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

uint32_t Streams::draw(uint32_t limit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<uint32_t>(random_() % limit);
}

void Streams::pause(Queue& queue) {
  queue.due = Clock::now();
  if (!queue.entries.empty() && queue.entries.front().late) {
    queue.due += std::chrono::microseconds(random_() % (100 * queue.laziness + 1));
  }
}

void Streams::put(uint64_t stream, Task task, bool late) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool first = queues_.count(stream) == 0;
  Queue& queue = queues_[stream];
  if (first) {
    constexpr uint32_t kLaziness[] = {0, 2, 20, 40};
    queue.laziness = kLaziness[random_() % 4];
  }
  queue.entries.push_back({std::move(task), late});
  if (queue.entries.size() == 1) {
    pause(queue);
  }
  changed_.notify_all();
}

void Streams::synchronize(uint64_t stream) {
  const auto reached = std::make_shared<std::atomic<bool>>(false);
  put(
      stream,
      [reached](bool) {
        *reached = true;
        return true;
      },
      false);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return reached->load(); });
}

void Streams::synchronizeAll() {
  std::vector<uint64_t> streams;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [stream, queue] : queues_) {
      if (stream >= 0x1000) { // others are no streams, and never end
        streams.push_back(stream);
      }
    }
  }
  for (const uint64_t stream : streams) {
    synchronize(stream);
  }
}

Streams::Queue* Streams::chooseReady(Clock::time_point now) {
  std::vector<Queue*> ready;
  for (auto& [stream, queue] : queues_) {
    if (!queue.entries.empty() && !queue.waits && (queue.due <= now || broken)) {
      ready.push_back(&queue);
    }
  }
  return ready.empty() ? nullptr : ready[random_() % ready.size()];
}

void Streams::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    Queue* const queue = chooseReady(Clock::now());
    if (queue == nullptr) {
      changed_.wait_for(lock, kLookEvery);
      for (auto& [stream, each] : queues_) {
        each.waits = false;
      }
      continue;
    }
    Task& task = queue->entries.front().task; // deques keep their elements where they are
    lock.unlock();
    const bool done = task(broken);
    lock.lock();
    if (!done) {
      queue->waits = true;
      continue;
    }
    const Entry ended = std::move(queue->entries.front());
    queue->entries.pop_front();
    pause(*queue);
    for (auto& [stream, each] : queues_) {
      each.waits = false;
    }
    changed_.notify_all();
    lock.unlock(); // what a task holds may go back through here
    const_cast<Task&>(ended.task) = nullptr;
    lock.lock();
  }
}

} // namespace fake_cuda
