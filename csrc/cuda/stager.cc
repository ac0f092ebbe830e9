#include "cuda/stager.h"

#include <chrono>
#include <utility>

namespace pycomm::cuda {
namespace {

constexpr size_t kSmallestBlock = 64 << 10;
// Between two looks at an event: a copy of 1 MiB takes about this long, and the wire much longer.
constexpr std::chrono::microseconds kLookEvery{20};

size_t capacityFor(size_t nbytes) {
  size_t capacity = kSmallestBlock;
  while (capacity < nbytes) {
    capacity *= 2;
  }
  return capacity;
}

ErrorRecord shutDown() {
  ErrorRecord record;
  record.code = ErrorCode::ShutDown;
  record.summary = "The process group was closed before the tensor had left its device.";
  record.hint = "wait for every operation before destroy_process_group()";
  return record;
}

} // namespace

Stager::Stager(DeviceRuntime& runtime, int device, Stream out, Stream in)
    : runtime_(runtime), device_(device), out_(out), in_(in), thread_([this] { threadMain(); }) {}

Stager::~Stager() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
  for (const Cooling& cooling : cooling_) {
    try {
      runtime_.waitEvent(cooling.event); // the device still reads the block
    } catch (const Error&) { // a broken device reads nothing
    }
    runtime_.destroyEvent(cooling.event);
  }
  for (Event event : events_) {
    runtime_.destroyEvent(event);
  }
  for (const auto& [block, capacity] : capacity_) {
    runtime_.freePinned(block);
  }
}

void* Stager::take(size_t nbytes) {
  const size_t capacity = capacityFor(nbytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  reclaim();
  if (const auto found = free_.find(capacity); found != free_.end()) {
    void* const block = found->second;
    free_.erase(found);
    return block;
  }
  runtime_.setDevice(device_);
  void* const block = runtime_.allocatePinned(capacity);
  capacity_.emplace(block, capacity);
  return block;
}

void Stager::give(void* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.emplace(capacity_.at(block), block);
}

void Stager::giveAfterCopies(void* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  runtime_.setDevice(device_);
  const Event event = takeEvent();
  cooling_.push_back({event, block}); // first, so that nothing is lost if the next line throws
  runtime_.record(event, in_);
}

void Stager::reclaim() {
  while (!cooling_.empty() && runtime_.eventDone(cooling_.front().event)) {
    void* const block = cooling_.front().block;
    free_.emplace(capacity_.at(block), block);
    events_.push_back(cooling_.front().event);
    cooling_.pop_front();
  }
}

Event Stager::takeEvent() {
  if (events_.empty()) {
    return runtime_.createEvent();
  }
  const Event event = events_.back();
  events_.pop_back();
  return event;
}

void Stager::toHost(const std::vector<Copy>& copies, Stream caller, Ready ready) {
  const std::lock_guard<std::mutex> lock(mutex_);
  runtime_.setDevice(device_);
  const Event entry = takeEvent();
  try {
    runtime_.record(entry, caller);
    runtime_.streamWait(in_, entry);
    if (!copies.empty()) {
      runtime_.streamWait(out_, entry);
      for (const Copy& copy : copies) {
        runtime_.copy(copy.host, copy.device, copy.nbytes, out_);
      }
      runtime_.record(entry, out_);
    }
  } catch (...) {
    events_.push_back(entry);
    throw;
  }
  if (copies.empty()) {
    events_.push_back(entry); // CUDA has taken what the wait needs: the event may be recorded anew
    entries_.push_back({nullptr, std::move(ready)});
  } else {
    entries_.push_back({entry, std::move(ready)});
  }
  changed_.notify_all();
}

void Stager::toDevice(const std::vector<Copy>& copies) {
  runtime_.setDevice(device_);
  for (const Copy& copy : copies) {
    runtime_.copy(copy.device, copy.host, copy.nbytes, in_);
  }
}

void Stager::waitOn(Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  runtime_.setDevice(device_);
  const Event event = takeEvent();
  events_.push_back(event); // kept also if something throws; the lock keeps others from it until it is through here
  runtime_.record(event, in_);
  runtime_.streamWait(stream, event);
}

void Stager::threadMain() noexcept {
  for (;;) {
    Entry entry;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || !entries_.empty(); });
      if (entries_.empty()) {
        return;
      }
      entry = std::move(entries_.front());
      entries_.pop_front();
    }
    await(entry);
  }
}

/// Waits for one entry's copies and says so. Also while stopping: a copy that is under way writes host memory.
void Stager::await(Entry& entry) noexcept {
  std::optional<ErrorRecord> failure;
  bool stopping = false;
  try {
    runtime_.setDevice(device_);
    while (entry.event != nullptr && !runtime_.eventDone(entry.event)) {
      std::this_thread::sleep_for(kLookEvery);
    }
  } catch (const Error& error) {
    failure = error.record();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping = stopping_;
    if (entry.event != nullptr) {
      events_.push_back(entry.event);
    }
  }
  if (stopping && !failure) {
    failure = shutDown();
  }
  try {
    entry.ready(failure);
  } catch (...) { // `ready` reports what goes wrong to its own operation
  }
}

} // namespace pycomm::cuda
