#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.h"
#include "device/device_runtime.h"

namespace pycomm::cuda {

/// Moves tensors of one device through pinned host memory, for collectives that run on the CPU.
///
///     caller's stream   … kernels … E                                        W … kernels …
///     out stream                     wait E, copies to the host, notify 1 …
///     this thread                                    ready(1)  ready(2)
///     (the wire)                                             collective 1
///     in stream                      wait E                               copies to the device
///
/// toHost() and toDevice() return at once. `ready` is called on this object's thread, in the order of the toHost(), when the
/// bytes are in host memory or their copy has failed: once for all copies of a call, or for each of them. It starts the collective,
/// or lets it go on. While one piece is on the wire the next one is being copied, in both directions of the bus.
///
/// CUDA notifies when a stream reaches a point. This class does not poll the device: polling would cost a core, and would break a graph
/// that another thread captures.
///
/// Pinned blocks are reused, in classes of powers of two. A block that the device may still read (after toDevice) is reused only when
/// the copy has ended. Thread-safe. Callers' threads have `device` as their current one.
class Stager {
 public:
  struct Copy {
    void* device = nullptr;
    void* host = nullptr; ///< within a block of take()
    size_t nbytes = 0;
  };
  /// `ended`: the number of this call's copies that have ended. The last `ready` has all of them, or a failure.
  using Ready = std::function<void(size_t ended, const std::optional<ErrorRecord>& failure)>;

  static constexpr std::chrono::milliseconds kDrainFor{5000};

  /// `runtime` lives as long as the process. The streams are of `device`, and differ.
  Stager(DeviceRuntime& runtime, int device, Stream out, Stream in);
  ~Stager(); ///< stop(), unless it was called
  Stager(const Stager&) = delete;
  Stager& operator=(const Stager&) = delete;

  /// Fails pending `ready`s with SHUT_DOWN as their copies end, and ends the thread; waits up to `drain_for`. If the stream is stuck
  /// longer, the thread and the blocks live on until it moves: the device may still write to them. Idempotent.
  void stop(std::chrono::milliseconds drain_for = kDrainFor);

  /// A pinned block of at least `nbytes`. Throws Error(OutOfMemory).
  [[nodiscard]] void* take(size_t nbytes);
  /// Gives back a block that no copy uses.
  void give(void* block);
  /// Gives back a block that copies of toDevice() may still read.
  void giveAfterCopies(void* block);

  /// Copies to the host behind the work of `caller`. Even without copies `in` waits for `caller`, since a later toDevice() may write
  /// memory that kernels of `caller` read now. `apart`: `ready` is called for each copy. Throws Error if the device refuses, and
  /// after stop(); `ready` is not called then, but earlier copies may still write to their blocks.
  void toHost(const std::vector<Copy>& copies, Stream caller, Ready ready, bool apart = false);
  void toDevice(const std::vector<Copy>& copies);
  /// Later work on `stream` waits for every toDevice() so far.
  void waitOn(Stream stream);

 private:
  /// One call of toHost().
  struct Batch {
    Ready ready;
    bool open = true; ///< toHost() has not returned; guarded, as the next, by the core's mutex
    bool over = false; ///< no more calls of `ready`
  };
  /// Copies that have ended or failed.
  struct Reach {
    std::shared_ptr<Batch> batch;
    size_t ended = 0;
    std::optional<ErrorRecord> failure;
  };

  /// Shared with the thread and with CUDA's notices, which may outlive the stager.
  struct Core {
    Core(DeviceRuntime& device_runtime, int number) : runtime(device_runtime), device(number) {}
    ~Core();
    Core(const Core&) = delete;
    Core& operator=(const Core&) = delete;
    void threadMain() noexcept;
    void report(Reach reach, std::unique_lock<std::mutex>& lock) noexcept;
    [[nodiscard]] Event takeEvent();
    void giveEvent(Event event);

    DeviceRuntime& runtime;
    const int device;
    // Guards all below. Not held while CUDA is called: a call may wait for room on a stream, and the stream for onReached().
    std::mutex mutex;
    std::condition_variable changed;
    std::list<Reach> reached; ///< in the order of the out stream
    size_t awaited = 0; ///< notices that CUDA has not given yet
    bool stopping = false;
    bool ended = false; ///< the thread has ended
    std::vector<Event> events; ///< unused
    std::multimap<size_t, void*> free; ///< by capacity
    std::map<void*, size_t> capacity; ///< of every block
  };
  /// CUDA's argument for onReached(): for copies to the host, or for a block that the device has read.
  struct Notice {
    Core* core; ///< its thread, or ~Stager, waits until `awaited` is 0
    std::list<Reach> reach; ///< one, or none if there is a block
    void* block = nullptr;
    std::multimap<size_t, void*>::node_type place; ///< the block's in Core::free
  };
  void notify(Stream stream, Notice notice);
  static void onReached(void* notice, const char* failure);

  DeviceRuntime& runtime_;
  Stream const out_;
  Stream const in_;
  const std::shared_ptr<Core> core_;
  std::thread thread_;
};

} // namespace pycomm::cuda
