#include "engine/closing.h"

#include <utility>

#include "base/fault_point.h"

namespace pycomm {

Closing::Closing(Planes& planes, Steps& steps, ErrorRecord reason)
    : planes_(planes), steps_(steps), reason_(std::move(reason)) {}

void Closing::begin(bool failed, Body closed) {
  closed_ = std::move(closed);
  if (planes_.host() == nullptr) {
    closeData();
  } else if (!failed) {
    closeHost();
  } else { // the failure goes from the control loop to the lane: after both rounds the plane has it
    steps_.onControl([] {}, [this] { steps_.onLane([] {}, [this] { closeHost(); }); });
  }
}

void Closing::closeHost() {
  planes_.host()->close(reason_);
  closeData();
}

void Closing::closeData() {
  if (planes_.data() == nullptr) {
    closeControl();
    return;
  }
  steps_.onLaneUntil(
      [this](Body over) { planes_.data()->close(reason_, std::move(over)); }, [this] { closeControl(); });
}

void Closing::closeControl() {
  static_cast<void>(PYCOMM_FAULT("group.said_goodbye"));
  if (planes_.control() == nullptr) {
    dropData();
    return;
  }
  const auto say_goodbye = [this] {
    steps_.leaveControl();
    control_links_ = planes_.control()->close();
    planes_.dropControl();
  };
  steps_.onControl(say_goodbye, [this] {
    steps_.closeGently(std::move(control_links_), [this] {
      static_cast<void>(PYCOMM_FAULT("group.links_closed"));
      dropData();
    });
  });
}

void Closing::dropData() {
  steps_.onLane([this] { planes_.dropData(); }, closed_);
}

} // namespace pycomm
