#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/error.h"
#include "engine/planes.h"

namespace pycomm {

/// The order in which the planes of a group close, for Group and for the simulator alike:
///
///   1. the host plane ends its operations, on the thread that called begin();
///   2. the data plane stops touching memory, ends its operations and says goodbye on bulk links, on the lane;
///   3. the control plane says goodbye and goes, on the control loop; its links stay until peers have had time to read that;
///   4. the data plane goes with its links, on the lane.
///
/// Bulk links go last: no goodbye can be said on one to a rank that does not read, and if that rank met the end of the link before the
/// goodbye on a control link, it would take it for a death.
///
/// A step whose plane was never opened is left out.
class Closing final {
 public:
  using Body = std::function<void()>;

  /// Where each step runs, and how its end is waited for: Group's thread waits, the simulator posts the step and returns. Each function
  /// calls `then` once, when its step is over.
  class Steps {
   public:
    virtual ~Steps() = default;
    virtual void onLane(Body body, Body then) = 0;
    /// The step is over when `body` has called what it gets, or if the lane has been stopped: then nothing there ever will.
    virtual void onLaneUntil(std::function<void(Body over)> body, Body then) = 0;
    virtual void onControl(Body body, Body then) = 0;
    /// On the control loop, as the control plane goes: nothing may use it any more.
    virtual void leaveControl() = 0;
    /// Closes control links on which a goodbye has been said, once their peers have had time to read it.
    virtual void closeGently(std::vector<std::unique_ptr<Link>> links, Body then) = 0;
  };

  /// Both outlive the last step. `reason`: what operations under way end with.
  Closing(Planes& planes, Steps& steps, ErrorRecord reason);

  /// `failed`: the group has failed; the planes get that first, so that operations end with its cause. Once.
  void begin(bool failed, Body closed);

 private:
  void closeHost();
  void closeData();
  void closeControl();
  void dropData();

  Planes& planes_;
  Steps& steps_;
  const ErrorRecord reason_;
  Body closed_;
  std::vector<std::unique_ptr<Link>> control_links_; ///< between their goodbye and their end
};

} // namespace pycomm
