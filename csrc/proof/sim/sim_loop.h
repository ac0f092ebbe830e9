#pragma once

#include <map>
#include <set>
#include <vector>

#include "engine/loop/loop.h"
#include "engine/loop/tickers.h"
#include "proof/sim/random.h"
#include "proof/sim/timeline.h"

namespace pycomm::sim {

/// Replaces epoll: reports the events of a descriptor.
class Readiness {
 public:
  virtual ~Readiness() = default;
  /// From now on `loop`, which watches `fd`, gets SimLoop::changed() on every change of it; null: no loop.
  virtual void setWatcher(int fd, class SimLoop* loop) = 0;
  [[nodiscard]] virtual uint32_t eventsOf(int fd) const = 0;
};

/// A native thread in virtual time. A turn does the same as EventLoop's, in the same order: ready descriptors (here in
/// random order), then tasks, then ticks that are due; level-triggered. A turn takes time, and sleeps end up to 2 ms
/// late, as epoll's do. A stopped or dead process has no turns.
class SimLoop final : public TaskLoop {
 public:
  struct Pace {
    Nanos turn_low = microseconds(1);
    Nanos turn_high = microseconds(20);
    Nanos oversleep = milliseconds(2);
  };

  SimLoop(Timeline& timeline, Readiness& readiness, Random random) noexcept
      : timeline_(timeline), readiness_(readiness), random_(random) {}

  /// Reports a change of a watched descriptor.
  void changed(int fd);

  void setPace(const Pace& pace) noexcept {
    pace_ = pace;
  }
  /// Simulates SIGSTOP and, with resume(), SIGCONT.
  void stop() noexcept {
    stopped_ = true;
  }
  void resume();
  /// Simulates SIGKILL.
  void kill() noexcept;

  // TaskLoop
  void post(Task task) override;
  void watch(int fd, uint32_t events, Handler& handler) override;
  void unwatch(int fd) noexcept override;
  void addTicker(Ticker& ticker) override;
  void removeTicker(Ticker& ticker) noexcept override {
    tickers_.remove(ticker);
  }
  void addBusy(int change) noexcept override {
    busy_ += change;
  }

  [[nodiscard]] int busy() const noexcept {
    return busy_;
  }

 private:
  struct Watch {
    uint32_t events;
    Handler* handler; ///< alive until unwatch, by the contract of watch
  };

  void turn();
  void wake(TimePoint instant);
  [[nodiscard]] uint32_t ready(int fd) const;

  Timeline& timeline_; ///< the run owns both, and they outlive all loops
  Readiness& readiness_;
  Random random_;
  Pace pace_;
  std::map<int, Watch> watches_;
  std::set<int> maybe_ready_;
  std::vector<Task> tasks_;
  Tickers tickers_;
  TimePoint busy_until_{};
  TimePoint next_turn_ = TimePoint::max();
  int64_t turn_serial_ = 0; ///< number of the next turn: wake-ups for an older one do nothing
  bool stopped_ = false;
  bool dead_ = false;
  int busy_ = 0;
};

} // namespace pycomm::sim
