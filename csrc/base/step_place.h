#pragma once

namespace pycomm {

/// Places of a step that survives deaths, in files that include torch and so have no fault points of their own (base/fault_point.h).
enum class StepPlace {
  Repack, ///< a bucket of a step that is summed again
  Deliver, ///< the averages of a bucket
  TakeOver, ///< the group of the next members
};

/// Throws what the fault point does. Does nothing unless the build has fault points.
void passStepPlace(StepPlace place);

} // namespace pycomm
