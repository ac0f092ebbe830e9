#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "engine/loop/callback_pool.h"
#include "engine/loop/event_loop.h"
#include "engine/monitor/local_peers.h"
#include "engine/report/flight_recorder.h"
#include "transport/memory/shared_heap.h"
#include "transport/net/address.h"

namespace pycomm {

class Endpoint;
class Group;

/// The native threads that all groups of a process share: one data loop, one control loop, the callback pool, and the watch over the other
/// processes of this host. A HostPlane, a CUDA device and a group that uses NCCL start threads of their own.
///
/// A program that embeds the library keeps one Engine, makes groups on it, and calls `shutdown` before the process ends, so that no native
/// thread outlives what it touches.
class Engine {
 public:
  /// Throws Error(TooManyFiles | SystemError).
  Engine();
  /// Shuts down without a bound on callbacks. Never in a child of fork(): there, keep the object.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  [[nodiscard]] EventLoop& dataLoop() noexcept {
    return *data_loop_;
  }
  [[nodiscard]] EventLoop& control() noexcept {
    return *control_;
  }
  [[nodiscard]] CallbackPool& callbacks() noexcept {
    return *callbacks_;
  }
  [[nodiscard]] LocalPeers& localPeers() noexcept {
    return *local_peers_;
  }
  [[nodiscard]] FlightRecorder& recorder() noexcept {
    return *recorder_;
  }
  /// Where tensors lie that other processes of this host reach in place; made when first asked for. Throws what SharedHeap::create
  /// throws, also later. It may outlive the engine.
  [[nodiscard]] std::shared_ptr<SharedHeap> heap();
  /// The heap of the process of that name (LocalPeers::name), mapped once for all groups. If it is not mapped yet, `ask` gets its descriptor.
  [[nodiscard]] std::shared_ptr<const SharedArena> heapOf(
      const std::string& name,
      const std::function<UniqueFd()>& ask);

  /// The endpoint of this process for those with such a key (what it listens on, and for which secret): one for all groups, opened by `open`
  /// if there is none.
  [[nodiscard]] std::shared_ptr<Endpoint> endpoint(
      const std::string& key,
      const std::function<std::shared_ptr<Endpoint>()>& open);

  /// False in a child of fork(): threads did not come along, so nothing here may be used.
  [[nodiscard]] bool belongsToThisProcess() const noexcept;

  /// What makes groups on threads of its own.
  class Maker {
   public:
    virtual ~Maker() = default;
    /// Ends these threads. Bounded, idempotent.
    virtual void close() noexcept = 0;
  };
  /// For shutdown(), which closes it before the groups. Throws Error(ShutDown) if that was called meanwhile.
  void add(const std::weak_ptr<Maker>& maker);
  /// For shutdown(): a group that was made on this engine. Throws Error(ShutDown) if that was called meanwhile.
  void add(const std::weak_ptr<Group>& group);
  /// An address without a port at which a group of this process is reached from other hosts; empty if there is none.
  [[nodiscard]] SocketAddress addressOfGroups(AddressFamily family);
  /// Closes every group, whatever is under way, and joins all threads. False if a callback of the user's has not returned by the
  /// deadline: call it again then. Idempotent. Not on a native thread. In a child of fork() it does nothing: the threads are the parent's.
  bool shutdown(Deadline deadline);

 private:
  template <typename Kept>
  void keep(std::vector<std::weak_ptr<Kept>>& list, const std::weak_ptr<Kept>& one) const;

  const uint32_t forks_; ///< forkCount() of the process that this belongs to
  std::unique_ptr<EventLoop> data_loop_;
  std::unique_ptr<EventLoop> control_;
  std::unique_ptr<LocalPeers> local_peers_;
  std::unique_ptr<FlightRecorder> recorder_; ///< outlives the pool's threads, which may be writing it down
  std::unique_ptr<CallbackPool> callbacks_;
  std::mutex mutex_; ///< guards the rest
  std::shared_ptr<SharedHeap> heap_;
  std::unordered_map<std::string, std::weak_ptr<const SharedArena>> mapped_heaps_;
  std::unordered_map<std::string, std::weak_ptr<Endpoint>> endpoints_;
  std::vector<std::weak_ptr<Group>> groups_;
  std::vector<std::weak_ptr<Maker>> makers_;
  bool shut_down_ = false;
};

} // namespace pycomm
