#include "base/step_place.h"

#include "base/fault_point.h"

namespace pycomm {

void passStepPlace(StepPlace place) {
  switch (place) {
    case StepPlace::Repack:
      PYCOMM_FAULT_POINT("ddp.repack");
      return;
    case StepPlace::Deliver:
      PYCOMM_FAULT_POINT("ddp.deliver");
      return;
    case StepPlace::TakeOver:
      PYCOMM_FAULT_POINT("ddp.take_over");
      return;
  }
}

} // namespace pycomm
