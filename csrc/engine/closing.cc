#include "engine/closing.h"

#include <utility>

#include "base/fault_point.h"

namespace pycomm {

namespace {

constexpr size_t kMostSteps = 9;

} // namespace

Closing::Closing(Planes& planes, bool failed, ErrorRecord reason, Body leave_control)
    : reason_(std::move(reason)), leave_control_(std::move(leave_control)) {
  steps.reserve(kMostSteps);
  const auto nothing = [](const Body&) {};
  if (planes.host() != nullptr) {
    if (failed) { // the failure goes from the control loop to the lane: after both rounds the host plane has it
      steps.push_back({Step::On::Control, nothing});
      steps.push_back({Step::On::Lane, nothing});
    }
    steps.push_back({Step::On::Caller, [this, &planes](const Body&) { planes.host()->close(reason_); }});
  }
  if (planes.data() != nullptr) {
    steps.push_back(
        {Step::On::LaneUntilOver, [this, &planes](const Body& over) { planes.data()->close(reason_, over); }});
  }
  steps.push_back({Step::On::Caller, [](const Body&) { static_cast<void>(PYCOMM_FAULT("group.said_goodbye")); }});
  if (planes.control() != nullptr) {
    steps.push_back({Step::On::Control, [this, &planes](const Body&) {
                       leave_control_();
                       control_links = planes.control()->close();
                       planes.dropControl();
                     }});
    steps.push_back({Step::On::ControlLinks, nothing});
    steps.push_back({Step::On::Caller, [](const Body&) { static_cast<void>(PYCOMM_FAULT("group.links_closed")); }});
  }
  steps.push_back({Step::On::Lane, [&planes](const Body&) { planes.dropData(); }});
}

} // namespace pycomm
