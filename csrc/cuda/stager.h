#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.h"
#include "cuda/device_runtime.h"

namespace pycomm::cuda {

/// Moves tensors of one device through pinned host memory, for collectives that run on the CPU.
///
///     caller's stream   … kernels … E                                        W … kernels …
///     out stream                     wait E, copies to the host, event 1 …
///     this thread                                    event 1? ready(1)  event 2? ready(2)
///     (the wire)                                             collective 1
///     in stream                      wait E                               copies to the device
///
/// toHost() and toDevice() return at once. `ready` is called on this object's thread, in the order of the toHost(), when the
/// bytes are in host memory or cannot come any more: once for all copies of a call, or for each of them. It starts the
/// collective, or lets it go on. While one piece is on the wire the next one is being copied, and both directions of the
/// bus are used.
///
/// Pinned blocks are kept and used again, in classes of powers of two; a block that the device may still read (after
/// toDevice) is used again only when the copy has ended. Thread-safe.
class Stager {
 public:
  struct Copy {
    void* device = nullptr;
    void* host = nullptr; ///< within a block of take()
    size_t nbytes = 0;
  };
  /// `ended`: how many copies of the call have; none of it is told anything more after the last one, or a failure.
  using Ready = std::function<void(size_t ended, const std::optional<ErrorRecord>& failure)>;

  /// `runtime` lives as long as the process. The streams are of `device`, and differ.
  Stager(DeviceRuntime& runtime, int device, Stream out, Stream in, std::chrono::milliseconds drain_for = kDrainFor);
  /// What is not ready yet is told so (SHUT_DOWN), then the thread ends; copies under way are waited for. Where they do not end in time
  /// (the caller's stream is stuck) they keep their blocks and the thread, which end when the copies do, if ever.
  ~Stager();
  Stager(const Stager&) = delete;
  Stager& operator=(const Stager&) = delete;

  /// A pinned block of at least `nbytes`. Throws Error(OutOfMemory).
  [[nodiscard]] void* take(size_t nbytes);
  /// Of a block that no copy uses.
  void give(void* block);
  /// Of a block that copies of toDevice() may still read.
  void giveAfterCopies(void* block);

  /// Copies to the host behind what `caller` holds. Also without copies `in` waits for `caller`: what toDevice() writes
  /// later may be what kernels of `caller` read now. `apart`: `ready` hears of each copy. Throws Error if the device
  /// refuses; `ready` is not called then, but what was copied before may still be written to.
  void toHost(const std::vector<Copy>& copies, Stream caller, Ready ready, bool apart = false);
  void toDevice(const std::vector<Copy>& copies);
  /// What is put onto `stream` from here on runs behind every toDevice() so far.
  void waitOn(Stream stream);

 private:
  /// One call of toHost().
  struct Batch {
    Ready ready;
    bool failed = false; ///< of the thread
  };
  struct Entry {
    Event event = nullptr; ///< null: ready at once
    std::shared_ptr<Batch> batch;
    size_t ended = 0; ///< copies, when the event has come
  };
  struct Cooling {
    Event event;
    void* block;
  };

  /// What the thread shares with the stager, and may outlive it with.
  struct Core {
    Core(DeviceRuntime& device_runtime, int number) : runtime(device_runtime), device(number) {}
    ~Core();
    Core(const Core&) = delete;
    Core& operator=(const Core&) = delete;
    void threadMain() noexcept;
    void coolDown(std::unique_lock<std::mutex>& lock) noexcept;
    void await(Entry& entry) noexcept;
    [[nodiscard]] Event takeEvent();
    void reclaim();

    DeviceRuntime& runtime;
    const int device;
    std::mutex mutex; ///< guards all below
    std::condition_variable changed;
    std::deque<Entry> entries;
    bool stopping = false;
    bool ended = false; ///< the thread is through
    std::vector<Event> events; ///< free ones
    std::multimap<size_t, void*> free; ///< by capacity
    std::map<void*, size_t> capacity; ///< of every block there is
    std::deque<Cooling> cooling; ///< in the order of the in stream
  };

  static constexpr std::chrono::milliseconds kDrainFor{5000};

  DeviceRuntime& runtime_;
  const int device_;
  Stream const out_;
  Stream const in_;
  const std::chrono::milliseconds drain_for_;
  const std::shared_ptr<Core> core_;
  std::thread thread_;
};

} // namespace pycomm::cuda
