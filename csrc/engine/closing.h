#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/planes.h"

namespace pycomm {

/// The order in which the planes of a group close, as a list: Group runs each step and waits for it, the simulator posts it.
///
///   1. the host plane ends its operations, on the thread that closes the group;
///   2. the data plane stops touching memory, ends its operations and says goodbye on bulk links, on the data loop;
///   3. the control plane says goodbye and goes, on the control loop; its links stay until peers have had time to read that;
///   4. the data plane goes with its links, on the data loop.
///
/// Bulk links go last: no goodbye can be said on one to a rank that does not read, and if that rank met the end of the link before the
/// goodbye on a control link, it would take it for a death.
///
/// A step whose plane was never opened is left out. To make the list takes no memory: a group that is destroyed must close.
struct Closing final {
  using Body = std::function<void()>;
  struct Step {
    enum class On {
      Caller, ///< the thread that closes the group
      DataLoop,
      DataLoopUntilOver, ///< over when it has called `over`, or if the data loop has been stopped: then nothing there ever will
      Control,
      ControlLinks, ///< closes `control_links` gently: once their peers have had time to read the goodbye. It has no body
    };
    On on;
    std::function<void(const Body& over)> run;
  };

  /// `failed`: the group has failed; the planes get that first, so that operations end with its cause. `reason`: what operations under way
  /// end with. `leave_control` runs on the control loop, as the control plane goes: nothing may use it any more. The planes outlive this.
  Closing(Planes& planes, bool failed, ErrorRecord reason, Body leave_control);
  Closing(const Closing&) = delete; // the steps refer to it
  Closing& operator=(const Closing&) = delete;

  [[nodiscard]] std::span<const Step> steps() const noexcept {
    return {steps_.data(), size_};
  }
  std::vector<std::unique_ptr<Link>> control_links; ///< between their goodbye and their end

 private:
  void add(Step::On on, std::function<void(const Body& over)> run) {
    steps_.at(size_++) = {on, std::move(run)};
  }

  std::array<Step, 8> steps_{};
  size_t size_ = 0;
  const ErrorRecord reason_;
  const Body leave_control_;
};

} // namespace pycomm
