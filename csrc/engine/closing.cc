#include "engine/closing.h"

#include <utility>

#include "base/fault_point.h"

namespace pycomm {

Closing::Closing(Planes& planes, bool failed, ErrorRecord reason, Body leave_control)
    : reason_(std::move(reason)), leave_control_(std::move(leave_control)) {
  const auto nothing = [](const Body&) {};
  if (planes.host() != nullptr) {
    if (failed) { // the failure comes from the control loop: after this round the host plane has it
      add(Step::On::Control, nothing);
    }
    add(Step::On::Caller, [this, &planes](const Body&) { planes.host()->close(reason_); });
  }
  if (planes.data() != nullptr) {
    add(Step::On::DataLoopUntilOver, [this, &planes](const Body& over) { planes.data()->close(reason_, over); });
  }
  add(Step::On::Caller, [](const Body&) { static_cast<void>(PYCOMM_FAULT("group.said_goodbye")); });
  if (planes.control() != nullptr) {
    add(Step::On::Control, [this, &planes](const Body&) {
      leave_control_();
      control_links = planes.control()->close();
      planes.dropControl();
    });
    add(Step::On::ControlLinks, nothing);
    add(Step::On::Caller, [](const Body&) { static_cast<void>(PYCOMM_FAULT("group.links_closed")); });
  }
  add(Step::On::DataLoop, [&planes](const Body&) { planes.dropData(); });
}

} // namespace pycomm
