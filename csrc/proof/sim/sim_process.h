#pragma once

#include <vector>

#include "proof/sim/sim_loop.h"

namespace pycomm::sim {

/// The networks of several groups, for the loops that serve all of them. Each has its own range of descriptors.
class Wires final : public Readiness {
 public:
  static constexpr int kFdsPerNetwork = 1 << 20;

  /// The network's descriptors must begin at kFdsPerNetwork times the number of networks before it.
  void add(Readiness& network) {
    networks_.push_back(&network);
  }
  void setWatcher(int fd, SimLoop* loop) override {
    of(fd).setWatcher(fd, loop);
  }
  [[nodiscard]] uint32_t eventsOf(int fd) const override {
    return of(fd).eventsOf(fd);
  }

 private:
  [[nodiscard]] Readiness& of(int fd) const {
    return *networks_[static_cast<size_t>(fd / kFdsPerNetwork)];
  }
  std::vector<Readiness*> networks_; ///< each lives as long as the loops
};

/// The native threads of one simulated process; as in Engine, all its groups share them.
struct SimProcess {
  SimProcess(Timeline& timeline, Readiness& readiness, Random random)
      : data_loop(timeline, readiness, random.fork()), control(timeline, readiness, random.fork()) {}

  void stop() noexcept {
    data_loop.stop();
    control.stop();
  }
  void resume() {
    data_loop.resume();
    control.resume();
  }
  void kill() noexcept {
    data_loop.kill();
    control.kill();
  }

  SimLoop data_loop;
  SimLoop control;
};

} // namespace pycomm::sim
