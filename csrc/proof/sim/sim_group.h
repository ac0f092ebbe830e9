#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "engine/closing.h"
#include "engine/planes.h"
#include "proof/sim/network.h"
#include "proof/sim/sim_process.h"

namespace pycomm::sim {

/// A process group on one simulated rank: the engine's own Planes on simulated loops and links.
class SimGroup final {
 public:
  struct Settings {
    GroupIdentity identity;
    Limits limits;
    Membership::Config membership;
    SimLoop::Pace data_loop_pace;
  };

  SimGroup(Timeline& timeline, Network& network, SimProcess& process, Settings settings);
  ~SimGroup();
  SimGroup(const SimGroup&) = delete;
  SimGroup& operator=(const SimGroup&) = delete;

  /// Adds a control link that exists from the beginning.
  void adopt(int peer, std::unique_ptr<Link> link);

  void post(std::shared_ptr<Operation> operation);
  void abort(ErrorRecord reason);
  /// Closes the group; `closed` is called at the end.
  void close(std::function<void()> closed);

  void stop();
  void resume();
  /// Ends the process now; its kernel closes its connections when Network::closeAllOf() is called.
  void kill();

  /// The group's failure, as the ranks agreed on it.
  [[nodiscard]] const std::optional<ErrorRecord>& failure() const noexcept {
    return failure_;
  }
  [[nodiscard]] TimePoint failedAt() const noexcept {
    return failed_at_;
  }
  [[nodiscard]] bool dead() const noexcept {
    return dead_;
  }
  /// Nullopt after the data plane has been destroyed.
  [[nodiscard]] std::optional<DataPlane::Usage> usage() const;
  /// Sets a listener that is called when the group fails.
  void onFailure(std::function<void(const ErrorRecord&)> listener) {
    on_failure_ = std::move(listener);
  }

 private:
  class Stranger;

  [[nodiscard]] Planes::Events planeEvents();
  /// Posts this step of closing, and at its end the next one.
  void post(size_t step);
  void closeControlLinksGently(Closing::Body then);

  void accept(std::unique_ptr<Link> link);
  void introduce(Stranger& stranger);

  Timeline& timeline_; ///< the run's, as are the network and the process
  Network& network_;
  const Settings settings_;
  const GroupIdentity& identity_; ///< in settings_
  SimProcess& process_;
  SimLoop& data_loop_; ///< the process's, as is control_loop_
  SimLoop& control_loop_;
  Planes planes_;
  std::optional<Closing> closing_; ///< since close()
  std::function<void()> closed_; ///< what that got
  std::map<int, std::unique_ptr<Stranger>> strangers_; ///< keyed by descriptor
  std::optional<ErrorRecord> failure_;
  TimePoint failed_at_{};
  std::function<void(const ErrorRecord&)> on_failure_;
  bool dead_ = false;
};

} // namespace pycomm::sim
