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

Stager::Stager(DeviceRuntime& runtime, int device, Stream out, Stream in, std::chrono::milliseconds drain_for)
    : runtime_(runtime),
      device_(device),
      out_(out),
      in_(in),
      drain_for_(drain_for),
      core_(std::make_shared<Core>(runtime, device)),
      thread_([core = core_] { core->threadMain(); }) {}

Stager::~Stager() {
  std::unique_lock<std::mutex> lock(core_->mutex);
  core_->stopping = true;
  core_->changed.notify_all();
  const bool ended = core_->changed.wait_for(lock, drain_for_, [&] { return core_->ended; });
  lock.unlock();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

Stager::Core::~Core() {
  for (const Cooling& each : cooling) { // left by a broken device, which reads nothing any more
    runtime.destroyEvent(each.event);
  }
  for (Event event : events) {
    runtime.destroyEvent(event);
  }
  for (const auto& [block, nbytes] : capacity) {
    runtime.freePinned(block);
  }
}

void* Stager::take(size_t nbytes) {
  const size_t capacity = capacityFor(nbytes);
  const std::lock_guard<std::mutex> lock(core_->mutex);
  core_->reclaim();
  if (const auto found = core_->free.find(capacity); found != core_->free.end()) {
    void* const block = found->second;
    core_->free.erase(found);
    return block;
  }
  runtime_.setDevice(device_);
  void* const block = runtime_.allocatePinned(capacity);
  core_->capacity.emplace(block, capacity);
  return block;
}

void Stager::give(void* block) {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  core_->free.emplace(core_->capacity.at(block), block);
}

void Stager::giveAfterCopies(void* block) {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  runtime_.setDevice(device_);
  const Event event = core_->takeEvent();
  core_->cooling.push_back({event, block}); // first, so that nothing is lost if the next line throws
  runtime_.record(event, in_);
}

void Stager::Core::reclaim() {
  while (!cooling.empty() && runtime.eventDone(cooling.front().event)) {
    void* const block = cooling.front().block;
    free.emplace(capacity.at(block), block);
    events.push_back(cooling.front().event);
    cooling.pop_front();
  }
}

Event Stager::Core::takeEvent() {
  if (events.empty()) {
    return runtime.createEvent();
  }
  const Event event = events.back();
  events.pop_back();
  return event;
}

void Stager::toHost(const std::vector<Copy>& copies, Stream caller, Ready ready, bool apart) {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  runtime_.setDevice(device_);
  const auto batch = std::make_shared<Batch>();
  batch->ready = std::move(ready);
  std::vector<Entry> entries;
  const Event start = core_->takeEvent();
  // CUDA has taken what a wait needs when streamWait() returns: the event may be recorded anew.
  core_->events.push_back(start);
  try {
    runtime_.record(start, caller);
    runtime_.streamWait(in_, start);
    if (!copies.empty()) {
      runtime_.streamWait(out_, start);
    }
    for (size_t i = 0; i < copies.size(); ++i) {
      runtime_.copy(copies[i].host, copies[i].device, copies[i].nbytes, out_);
      if (apart || i + 1 == copies.size()) {
        entries.push_back({core_->takeEvent(), batch, i + 1});
        runtime_.record(entries.back().event, out_);
      }
    }
  } catch (...) {
    for (const Entry& entry : entries) {
      core_->events.push_back(entry.event);
    }
    throw;
  }
  if (copies.empty()) {
    entries.push_back({nullptr, batch, 0});
  }
  for (Entry& entry : entries) {
    core_->entries.push_back(std::move(entry));
  }
  core_->changed.notify_all();
}

void Stager::toDevice(const std::vector<Copy>& copies) {
  runtime_.setDevice(device_);
  for (const Copy& copy : copies) {
    runtime_.copy(copy.device, copy.host, copy.nbytes, in_);
  }
}

void Stager::waitOn(Stream stream) {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  runtime_.setDevice(device_);
  const Event event = core_->takeEvent();
  core_->events.push_back(
      event); // kept also if something throws; the lock keeps others from it until it is through here
  runtime_.record(event, in_);
  runtime_.streamWait(stream, event);
}

void Stager::Core::threadMain() noexcept {
  for (;;) {
    Entry entry;
    {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [&] { return stopping || !entries.empty(); });
      if (entries.empty()) {
        coolDown(lock);
        ended = true;
        changed.notify_all();
        return;
      }
      entry = std::move(entries.front());
      entries.pop_front();
    }
    await(entry);
  }
}

/// Until the device has read all blocks.
void Stager::Core::coolDown(std::unique_lock<std::mutex>& lock) noexcept {
  try {
    for (reclaim(); !cooling.empty(); reclaim()) {
      lock.unlock();
      std::this_thread::sleep_for(kLookEvery);
      lock.lock();
    }
  } catch (const Error&) { // a broken device reads nothing
  }
}

/// Waits for one entry's copies and says so. Also while stopping: a copy that is under way writes host memory.
void Stager::Core::await(Entry& entry) noexcept {
  std::optional<ErrorRecord> failure;
  try {
    runtime.setDevice(device);
    while (entry.event != nullptr && !runtime.eventDone(entry.event)) {
      std::this_thread::sleep_for(kLookEvery);
    }
  } catch (const Error& error) {
    failure = error.record();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (stopping && !failure) {
      failure = shutDown();
    }
    if (entry.event != nullptr) {
      events.push_back(entry.event);
    }
  }
  Batch& batch = *entry.batch;
  if (std::exchange(batch.failed, batch.failed || failure.has_value())) {
    return; // it has been told
  }
  try {
    batch.ready(entry.ended, failure);
  } catch (...) { // `ready` reports what goes wrong to its own operation
  }
}

} // namespace pycomm::cuda
