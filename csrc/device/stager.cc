#include "device/stager.h"

#include <utility>

#include "base/native_thread.h"

namespace pycomm::cuda {
namespace {

constexpr size_t kSmallestBlock = 64 << 10;

size_t capacityFor(size_t nbytes) {
  size_t capacity = kSmallestBlock;
  while (capacity < nbytes) {
    capacity *= 2;
  }
  return capacity;
}

ErrorRecord shutDown() noexcept {
  ErrorRecord record;
  record.code = ErrorCode::ShutDown;
  try {
    record.summary = "The process group was closed before the tensor had left its device.";
    record.hint = "wait for every operation before destroy_process_group()";
  } catch (...) { // no memory for the words
  }
  return record;
}

ErrorRecord brokenDevice(const char* error) noexcept {
  ErrorRecord record;
  record.code = ErrorCode::SystemError;
  try {
    record.summary = "CUDA: a tensor could not leave its device.";
    record.cause = error;
    record.hint = "CUDA_LAUNCH_BLOCKING=1 shows which call broke the device; nvidia-smi shows whether it is there";
  } catch (...) { // no memory for the words
  }
  return record;
}

} // namespace

Stager::Stager(DeviceRuntime& runtime, int device, Stream out, Stream in)
    : runtime_(runtime), out_(out), in_(in), core_(std::make_shared<Core>(runtime, device)) {
  thread_ = startNativeThread("pycomm-stager", [core = core_] { core->threadMain(); });
}

Stager::~Stager() {
  stop();
}

void Stager::stop(std::chrono::milliseconds drain_for) {
  if (!thread_.joinable()) {
    return;
  }
  bool ended = false;
  {
    std::unique_lock<std::mutex> lock(core_->mutex);
    core_->stopping = true;
    core_->changed.notify_all();
    ended = core_->changed.wait_for(lock, drain_for, [&] { return core_->ended; });
  }
  ended ? thread_.join() : thread_.detach();
}

Stager::Core::~Core() {
  for (Event event : events) {
    runtime.destroyEvent(event);
  }
  for (const auto& [block, nbytes] : capacity) {
    runtime.freePinned(block);
  }
}

void* Stager::take(size_t nbytes) {
  const size_t wanted = capacityFor(nbytes);
  {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    if (const auto found = core_->free.find(wanted); found != core_->free.end()) {
      void* const block = found->second;
      core_->free.erase(found);
      return block;
    }
  }
  void* const block = runtime_.allocatePinned(wanted);
  const std::lock_guard<std::mutex> lock(core_->mutex);
  core_->capacity.emplace(block, wanted);
  return block;
}

void Stager::give(void* block) {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  core_->free.emplace(core_->capacity.at(block), block);
}

void Stager::giveAfterCopies(void* block) {
  Notice notice{core_.get(), {}, block, {}};
  {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    notice.place = core_->free.extract(core_->free.emplace(core_->capacity.at(block), block));
  }
  notify(in_, std::move(notice));
}

Event Stager::Core::takeEvent() {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!events.empty()) {
      const Event event = events.back();
      events.pop_back();
      return event;
    }
  }
  return runtime.createEvent();
}

// CUDA has taken what a wait needs when streamWait() returns: the event may be recorded anew.
void Stager::Core::giveEvent(Event event) {
  const std::lock_guard<std::mutex> lock(mutex);
  events.push_back(event);
}

void Stager::notify(Stream stream, Notice notice) {
  {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    if (core_->stopping) {
      if (notice.block != nullptr) {
        core_->capacity.erase(notice.block); // never freed: no thread can learn any more that the device has read it
        return;
      }
      throw Error(shutDown());
    }
    ++core_->awaited;
  }
  auto given = std::make_unique<Notice>(std::move(notice));
  try {
    runtime_.whenReached(stream, &onReached, given.get());
    static_cast<void>(given.release());
  } catch (...) {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    --core_->awaited;
    core_->changed.notify_all();
    throw;
  }
}

// On CUDA's thread, which an exception would end together with the process. Only a record of a failure takes memory.
void Stager::onReached(void* context, const char* failure) {
  const std::unique_ptr<Notice> notice(static_cast<Notice*>(context));
  Core& core = *notice->core;
  const std::lock_guard<std::mutex> lock(core.mutex);
  if (notice->block != nullptr) {
    core.free.insert(std::move(notice->place)); // a broken device reads nothing, either
  } else {
    if (failure != nullptr) {
      notice->reach.front().failure = brokenDevice(failure);
    }
    core.reached.splice(core.reached.end(), notice->reach);
  }
  --core.awaited;
  core.changed.notify_all();
}

void Stager::toHost(const std::vector<Copy>& copies, Stream caller, Ready ready, bool apart) {
  const auto batch = std::make_shared<Batch>();
  batch->ready = std::move(ready);
  const auto close = [&](bool over) {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    batch->open = false;
    batch->over = over;
    core_->changed.notify_all();
  };
  const auto notifyOf = [&](size_t ended) {
    Notice notice{core_.get(), {}, nullptr, {}};
    notice.reach.push_back({batch, ended, std::nullopt});
    notify(out_, std::move(notice));
  };
  const Event start = core_->takeEvent();
  try {
    runtime_.record(start, caller);
    runtime_.streamWait(in_, start);
    if (!copies.empty()) {
      runtime_.streamWait(out_, start);
    }
    for (size_t i = 0; i < copies.size(); ++i) {
      runtime_.copy(copies[i].host, copies[i].device, copies[i].nbytes, out_);
      if (apart || i + 1 == copies.size()) {
        notifyOf(i + 1);
      }
    }
    if (copies.empty()) {
      notifyOf(0);
    }
  } catch (...) {
    close(true);
    core_->giveEvent(start);
    throw;
  }
  core_->giveEvent(start);
  close(false);
}

void Stager::toDevice(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    runtime_.copy(copy.device, copy.host, copy.nbytes, in_);
  }
}

void Stager::waitOn(Stream stream) {
  const Event event = core_->takeEvent();
  try {
    runtime_.record(event, in_);
    runtime_.streamWait(stream, event);
  } catch (...) {
    core_->giveEvent(event);
    throw;
  }
  core_->giveEvent(event);
}

void Stager::Core::threadMain() noexcept {
  try {
    runtime.setDevice(device); // for what is freed here, if this thread is the last to hold it
  } catch (const Error&) { // a broken device: nothing is freed that matters
  }
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    // Also while stopping: a copy that is under way writes host memory.
    changed.wait(lock, [&] { return !reached.empty() || (stopping && awaited == 0); });
    if (reached.empty()) {
      ended = true;
      changed.notify_all();
      return;
    }
    Reach reach = std::move(reached.front());
    reached.pop_front();
    changed.wait(lock, [&] { return !reach.batch->open; });
    report(std::move(reach), lock);
  }
}

void Stager::Core::report(Reach reach, std::unique_lock<std::mutex>& lock) noexcept {
  Batch& batch = *reach.batch;
  if (stopping && !reach.failure) {
    reach.failure = shutDown();
  }
  const bool skip = std::exchange(batch.over, batch.over || reach.failure.has_value());
  lock.unlock();
  try {
    if (!skip) {
      batch.ready(reach.ended, reach.failure);
    }
  } catch (...) { // `ready` reports what goes wrong to its own operation
  }
  reach.batch.reset(); // with no lock held: it may be the last to hold a group
  lock.lock();
}

} // namespace pycomm::cuda
