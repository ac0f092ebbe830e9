#pragma once

#include "engine/loop/loop.h"
#include "engine/loop/task.h"

namespace pycomm {

/// A loop to which other threads hand tasks. Planes that run on two loops notify each other so.
class TaskLoop : public Loop {
 public:
  /// Runs `task` on the loop's thread, soon. Any thread.
  virtual void post(Task task) = 0;
};

} // namespace pycomm
