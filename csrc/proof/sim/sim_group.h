#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "engine/data/data_plane.h"
#include "engine/monitor/control_plane.h"
#include "proof/sim/network.h"
#include "proof/sim/sim_process.h"

namespace pycomm::sim {

/// A process group on one simulated rank: the engine's own DataPlane and ControlPlane on simulated loops and links,
/// with what Group puts between the two.
class SimGroup final : private Loop::Owner {
 public:
  struct Settings {
    GroupIdentity identity;
    Protocol::Config limits;
    Membership::Config membership;
    SimLoop::Pace lane_pace;
  };

  SimGroup(Timeline& timeline, Network& network, SimProcess& process, Settings settings);
  ~SimGroup() override;
  SimGroup(const SimGroup&) = delete;
  SimGroup& operator=(const SimGroup&) = delete;

  /// A control link, there from the beginning.
  void adopt(int peer, std::unique_ptr<Link> link);

  void post(std::shared_ptr<Operation> operation);
  void abort(ErrorRecord reason);
  /// Leaves; `closed` is called when that is done.
  void close(std::function<void()> closed);

  void stop();
  void resume();
  /// The process ends now; its kernel closes what was open when Network::closeAllOf says so.
  void kill();

  /// What the group died of, as the ranks agreed.
  [[nodiscard]] const std::optional<ErrorRecord>& failure() const noexcept {
    return failure_;
  }
  [[nodiscard]] TimePoint failedAt() const noexcept {
    return failed_at_;
  }
  [[nodiscard]] bool dead() const noexcept {
    return dead_;
  }
  /// Nothing once the data plane is gone.
  [[nodiscard]] std::optional<DataPlane::Usage> usage() const;
  /// Called when the group has failed.
  void onFailure(std::function<void(const ErrorRecord&)> listener) {
    on_failure_ = std::move(listener);
  }

 private:
  class Stranger;

  /// As Group does: on either loop, what its tasks throw becomes the group's failure.
  template <typename Body>
  void soon(SimLoop& loop, Body body) {
    loop.post(Loop::owned(*this, std::move(body)));
  }
  void onThrown(const std::exception_ptr& exception) noexcept override;
  void accept(std::unique_ptr<Link> link);
  void introduce(Stranger& stranger);

  Timeline& timeline_; ///< the run's, as are the network and the process
  Network& network_;
  const Settings settings_;
  const GroupIdentity& identity_; ///< in settings_
  SimProcess& process_;
  SimLoop& lane_; ///< the process's, as is the other
  SimLoop& control_loop_;
  std::unique_ptr<ControlPlane> control_;
  std::unique_ptr<DataPlane> data_;
  std::map<int, std::unique_ptr<Stranger>> strangers_; ///< by descriptor
  std::optional<ErrorRecord> failure_;
  TimePoint failed_at_{};
  std::function<void(const ErrorRecord&)> on_failure_;
  bool dead_ = false;
};

} // namespace pycomm::sim
