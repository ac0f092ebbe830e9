#include "engine/loop/task_queue.h"

#include <string>

#include "base/log.h"

namespace pycomm {

void TaskQueue::logThrown(const std::exception_ptr& exception) noexcept {
  try {
    try {
      std::rethrow_exception(exception);
    } catch (const std::exception& error) {
      log(LogLevel::Warn, std::string("a task of a native thread failed: ") + error.what());
    }
  } catch (...) { // no exception of ours, or no memory for the line
  }
}

} // namespace pycomm
