#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>

#include "base/deadline.h"
#include "engine/loop/staging_pool.h"
#include "engine/loop/task.h"

namespace pycomm {

/// What the planes of a group need of the thread that runs them: descriptors watched, ticks in time. EventLoop is the
/// one with epoll; the simulator has another, so that it runs the very planes that the engine runs.
class Loop {
 public:
  /// Answers for what the loop runs. A loop catches every exception, so that none ends the process, and gives it to the owner.
  class Owner {
   public:
    virtual ~Owner() = default;
    /// Ends what the exception has left unfinished with a typed error. On the loop.
    virtual void onThrown(const std::exception_ptr& exception) noexcept = 0;
  };

  /// Told when its descriptor is ready. Alive until onReady() has returned, or else that throws nothing.
  class Handler : public Owner {
   public:
    virtual void onReady(uint32_t events) = 0;
  };

  /// Told when time has passed.
  class Ticker : public Owner {
   public:
    /// When `tick` wants to be called next; TimePoint::max() for never. kAtOnce if it has work that it does in slices, one in each tick: of
    /// the tickers that have some, one gets a tick in each turn of the loop.
    static constexpr TimePoint kAtOnce = TimePoint::min();
    [[nodiscard]] virtual TimePoint nextTick() const noexcept = 0;
    virtual void tick(TimePoint now) = 0;

    enum class Look {
      Nothing, ///< there is nothing that only this could find: ask the kernel about all descriptors
      NotYet, ///< what is waited for has not come
      Moved
    };
    /// A driver that spins asks this before it asks the kernel about all descriptors: to try to read from the one connection
    /// from which something is due costs one system call, where being told that it is readable and then reading costs two.
    [[nodiscard]] virtual Look look() {
      return Look::Nothing;
    }

    // For tickers that receive through shared memory, of which the kernel knows nothing:
    [[nodiscard]] virtual bool sharesMemory() const noexcept { ///< whether this is one of them
      return false;
    }
    /// Processes what arrived through shared memory; returns whether anything did. Costs a few loads if nothing did.
    [[nodiscard]] virtual bool pollShared() {
      return false;
    }
    /// Called before the loop sleeps: asks writers of shared rings to signal a descriptor. Returns false if a ring already has bytes.
    [[nodiscard]] virtual bool restShared() noexcept {
      return true;
    }
  };

  virtual ~Loop() = default;

  /// Runs `body`, which may throw, on behalf of `owner`.
  template <typename Body>
  static void guarded(Owner& owner, Body&& body) noexcept {
    try {
      body();
    } catch (...) {
      owner.onThrown(std::current_exception());
    }
  }
  /// A task of `owner`, which is alive when the task runs.
  template <typename Body>
  [[nodiscard]] static auto owned(Owner& owner, Body body) {
    return [&owner, body = std::move(body)]() mutable noexcept { guarded(owner, body); };
  }

  /// The handler outlives its watch. A second call for the same descriptor changes the events.
  virtual void watch(int fd, uint32_t events, Handler& handler) = 0;
  virtual void unwatch(int fd) noexcept = 0;

  virtual void addTicker(Ticker& ticker) = 0;
  virtual void removeTicker(Ticker& ticker) noexcept = 0;

  /// Counts work that goes on without a driver: +1 when it starts, -1 when it ends.
  virtual void addBusy(int change) noexcept = 0;

  /// Lets go of memory that the kernel is slow to take back: a loop with other threads beside it does not do that itself.
  virtual void discard(std::shared_ptr<const void> memory) noexcept {
    memory.reset();
  }

  /// For the frames of all groups that this loop serves.
  [[nodiscard]] StagingMemory& stagingMemory() noexcept {
    return staging_memory_;
  }

 private:
  static constexpr size_t kKeepStagingNbytes = 32 << 20;
  StagingMemory staging_memory_{kKeepStagingNbytes, [this](std::shared_ptr<const void> memory) {
                                  discard(std::move(memory));
                                }};
};

/// A loop to which other threads hand tasks. Planes that run on two loops notify each other so.
class TaskLoop : public Loop {
 public:
  /// Runs `task` on the loop's thread, soon. Any thread.
  virtual void post(Task task) = 0;
};

} // namespace pycomm
