#include "engine/engine.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <iterator>
#include <thread>
#include <utility>

#include "base/fork_guard.h"
#include "base/native_thread.h"
#include "engine/group.h"
#include "engine/meeting/endpoint.h"

namespace pycomm {
namespace {

// A group waits some 40 ms for its peers as it closes. So many at a time close hundreds in less than a second.
constexpr size_t kClosers = 32;

/// Closes all groups. Each waits for its peers, which may close theirs in another order: so they close at the same time, on threads.
void closeAll(const std::vector<std::weak_ptr<Group>>& groups) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr first_error; // guarded by mutex
  const auto closeOnes = [&] {
    for (size_t i = next++; i < groups.size(); i = next++) {
      try {
        if (const std::shared_ptr<Group> group = groups[i].lock()) {
          group->close();
        }
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        first_error = first_error ? first_error : std::current_exception();
      }
    }
  };
  std::vector<std::thread> closers;
  try {
    closers.reserve(kClosers);
    while (closers.size() + 1 < std::min(groups.size(), kClosers)) {
      closers.push_back(startNativeThread("pycomm-close", closeOnes));
    }
  } catch (...) { // no memory for a thread: the others, and this one, close all
  }
  closeOnes();
  for (std::thread& closer : closers) {
    closer.join();
  }
  if (first_error) {
    std::rethrow_exception(first_error);
  }
}

} // namespace

Engine::Engine()
    : forks_(forkCount()),
      data_loop_(std::make_unique<EventLoop>("pycomm-data")),
      control_(std::make_unique<EventLoop>("pycomm-control")),
      local_peers_(std::make_unique<LocalPeers>(*control_, [this] { return recorder_->report(); })),
      callbacks_(std::make_unique<CallbackPool>()) {
  recorder_ = std::make_unique<FlightRecorder>(*callbacks_);
  data_loop_->setSpin(kRoundTrip);
  data_loop_->discardOn(*callbacks_);
  installForkGuard();
}

Engine::~Engine() {
  shutdown(Deadline::never());
}

bool Engine::belongsToThisProcess() const noexcept {
  return forkCount() == forks_;
}

void Engine::add(const std::weak_ptr<Group>& group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  keep(groups_, group);
}

void Engine::add(const std::weak_ptr<Maker>& maker) {
  const std::lock_guard<std::mutex> lock(mutex_);
  keep(makers_, maker);
}

SocketAddress Engine::addressOfGroups(AddressFamily family) {
  std::vector<std::shared_ptr<Group>> groups; // let go of without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const std::weak_ptr<Group>& weak : groups_) {
    groups.push_back(weak.lock());
    const SocketAddress address =
        groups.back() == nullptr ? SocketAddress() : groups.back()->identity().addressForOthers();
    if (!address.empty() && (family == AddressFamily::Any || family == address.family())) {
      return address;
    }
  }
  return {};
}

template <typename Kept>
void Engine::keep(std::vector<std::weak_ptr<Kept>>& list, const std::weak_ptr<Kept>& one) const {
  if (shut_down_) {
    throw Error(
        ErrorCode::ShutDown,
        "pycomm was shut down while a process group was being joined",
        "join groups before the process begins to exit");
  }
  std::erase_if(list, [](const auto& entry) { return entry.expired(); });
  list.push_back(one);
}

std::shared_ptr<SharedHeap> Engine::heap() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (heap_ == nullptr) {
    heap_ = SharedHeap::create();
  }
  return heap_;
}

std::shared_ptr<const SharedArena> Engine::heapOf(const std::string& name, const std::function<UniqueFd()>& ask) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = mapped_heaps_.find(name);
    if (auto heap = known == mapped_heaps_.end() ? nullptr : known->second.lock()) {
      return heap;
    }
  }
  SharedArena mapped = SharedArena::attach(ask(), std::nullopt); // waits for the other process, so without the lock
  mapped.closeFd();
  auto made = std::make_shared<const SharedArena>(std::move(mapped));
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto at = mapped_heaps_.begin();
       at != mapped_heaps_.end();) { // processes that have gone are not asked for again
    at = at->second.expired() ? mapped_heaps_.erase(at) : std::next(at);
  }
  mapped_heaps_[name] = made;
  return made;
}

std::shared_ptr<Endpoint> Engine::endpoint(
    const std::string& key,
    const std::function<std::shared_ptr<Endpoint>()>& open) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::weak_ptr<Endpoint>& known = endpoints_[key];
  std::shared_ptr<Endpoint> endpoint = known.lock();
  if (endpoint == nullptr) {
    endpoint = open();
    known = endpoint;
  }
  return endpoint;
}

bool Engine::shutdown(Deadline deadline) {
  if (!belongsToThisProcess()) {
    return true;
  }
  std::vector<std::weak_ptr<Group>> groups;
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  std::vector<std::weak_ptr<Maker>> makers;
  for (bool none_left = false; !none_left;) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      makers = std::exchange(makers_, {});
      none_left = makers.empty();
      shut_down_ =
          none_left; // not before: until its close() a maker tells the other members itself why it meets them no more
    }
    for (const std::weak_ptr<Maker>& open : makers) {
      if (const std::shared_ptr<Maker> maker = open.lock()) {
        maker->close();
      }
    }
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    groups.swap(groups_);
    for (const auto& [key, open] : endpoints_) {
      if (auto endpoint = open.lock()) {
        endpoints.push_back(std::move(endpoint));
      }
    }
    endpoints_.clear();
  }
  closeAll(groups);
  for (const std::shared_ptr<Endpoint>& endpoint : endpoints) {
    endpoint->close();
  }
  // Callbacks first: the closed groups have ended every operation, so those that wait for one return now.
  if (!callbacks_->stop(deadline)) {
    return false;
  }
  local_peers_->close();
  data_loop_->stop();
  control_->stop();
  return callbacks_->close(deadline);
}

} // namespace pycomm
