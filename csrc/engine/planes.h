#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/data/data_plane.h"
#include "engine/host/host_plane.h"
#include "engine/loop/loop.h"
#include "engine/monitor/control_plane.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/operation.h"
#include "engine/report/group_failure.h"

namespace pycomm {

/// The planes of one group and the wiring between them: an event of one plane becomes a task on the loop of the other.
///
/// Group makes them on the engine's loops, the simulator on simulated loops. So the simulator runs the wiring that ships.
///
/// Each plane belongs to its loop, which opens, uses and closes it. A task may run after its plane is closed: onData(), onControl() and
/// run() look for that. Exceptions from tasks of the group (withControl(), Loop::owned(planes, …)) become the group's failure.
///
/// The owner closes the planes, and both loops run what was posted, before this object goes. So `this` is alive in every task and event.
class Planes final : public Loop::Owner {
 public:
  struct Events {
    /// The group has failed. On the control loop, before any operation ends with the cause; once, unless it throws.
    std::function<void(const ErrorRecord& cause)> failed;
    /// Per plane, before its operations end with the cause. Any thread, of two planes at the same time; may be null, as `ended`.
    OldestEnds ending;
    /// Every operation has ended with the cause. Any thread.
    std::function<void()> ended;
  };
  using DataStep = void (DataPlane::*)(const std::shared_ptr<Operation>&);

  /// The identity and the loops outlive this object.
  Planes(const GroupIdentity& identity, TaskLoop& data_loop, TaskLoop& control, Events events);
  ~Planes() override;
  Planes(const Planes&) = delete;
  Planes& operator=(const Planes&) = delete;

  // On the data loop:
  void openData(DataPlane::Options options = {});
  /// After DataPlane::close() has called back.
  void dropData() noexcept;
  /// Null before openData() and after dropData().
  [[nodiscard]] DataPlane* data() const noexcept {
    return data_.get();
  }
  /// Runs one step of the data plane. If the plane is closed, the operation ends with SHUT_DOWN.
  void run(DataStep step, const std::shared_ptr<Operation>& operation);

  // On the control loop:
  void openControl(std::vector<Listener> listeners, Membership::Config membership);
  /// After openData(). The plane stays until this object goes; HostPlane::close() ends its work.
  void openHost(std::shared_ptr<const SharedArena> arena, HostHeaps heaps, HostPlane::Config config);
  /// The kernel has ended the process of a neighbour on this host. Before dropControl(). Of other ranks of the host, a neighbour of theirs
  /// reports it: kEndedByKernel.
  void died(int peer);
  /// After ControlPlane::close().
  void dropControl() noexcept;
  /// Null before openControl() and after dropControl().
  [[nodiscard]] ControlPlane* control() const noexcept {
    return control_.get();
  }

  /// Runs body(plane) if the plane is open, on the control loop. The plane reports what that throws.
  template <typename Body>
  void withControl(Body&& body) noexcept {
    if (control_ != nullptr) {
      Loop::guarded(static_cast<Loop::Ticker&>(*control_), [&] { body(*control_); });
    }
  }

  // Any thread:
  /// Posts body(plane) to the loop of the plane. The body does not run if the plane is closed by then.
  template <typename Body>
  void onData(Body body) {
    data_loop_.post(Loop::owned(*this, [this, body = std::move(body)]() mutable {
      if (data_ != nullptr) {
        body(*data_);
      }
    }));
  }
  template <typename Body>
  void onControl(Body body) {
    control_loop_.post([this, body = std::move(body)]() mutable noexcept { withControl(body); });
  }
  /// Null if the ranks share no memory. Does not change once the group is in use.
  [[nodiscard]] HostPlane* host() const noexcept {
    return host_.get();
  }
  /// Leaks the planes. For a child of fork(), in which neither their threads nor their connections exist.
  void abandon() noexcept;

  // Loop::Owner; on either loop
  void onThrown(const std::exception_ptr& exception) noexcept override;

 private:
  class QuestionInFlight;

  void onFailed(const ErrorRecord& cause);
  void onEnded();
  void adoptBulkLink(const Hello& hello, std::unique_ptr<Link> link);
  void onAsked(int from, const FrameHeader& question);

  const GroupIdentity& identity_;
  TaskLoop& data_loop_;
  TaskLoop& control_loop_;
  const Events events_;
  std::atomic<size_t> questions_{0}; ///< on their way from the control loop to the data loop
  std::atomic<int> unended_{0}; ///< after the failure: planes with operations that have not ended
  bool told_failed_ = false; ///< the control loop's: Events::failed has been called
  std::unique_ptr<ControlPlane> control_; ///< the control loop's
  std::unique_ptr<DataPlane> data_; ///< the data loop's
  std::unique_ptr<HostPlane> host_; ///< any thread's, once the control loop has opened it
};

} // namespace pycomm
