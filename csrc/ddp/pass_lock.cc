#include "ddp/pass_lock.h"

#include <c10/util/Exception.h>

#include "base/wait_point.h"
#include "c10d/process_end.h"
#include "c10d/without_gil.h"
#include "engine/operation/issue_context.h"

namespace pycomm {

void PassLock::lock() {
  if (!try_lock()) {
    TORCH_CHECK(
        owner_.load() != std::this_thread::get_id(),
        "a signal handler or a comm hook called a DistributedDataParallel wrapper on the thread that runs its backward pass. "
        "Try: set a flag there, and call the wrapper between two passes; stats() may be called at any time");
    TORCH_CHECK(
        IssueContext::current() == nullptr,
        "a comm hook or a callback of a future called a DistributedDataParallel wrapper whose backward pass is under way, "
        "and may wait for it. Try: call the wrapper between two passes; stats() may be called at any time");
    StayWithin::enter();
    take();
  }
}

void PassLock::take() noexcept {
  const WithoutGil no_gil;
  beforeWait();
  mutex_.lock();
  owner_.store(std::this_thread::get_id());
}

void PassLock::giveBack() noexcept {
  owner_.store(std::thread::id());
  mutex_.unlock();
}

bool PassLock::refuses() const noexcept {
  return owner_.load() == std::this_thread::get_id() || IssueContext::current() != nullptr;
}

bool PassLock::try_lock() noexcept {
  if (owner_.load() == std::this_thread::get_id()) {
    return false;
  }
  StayWithin::enter(); // which may not return: before the turn is taken
  if (!mutex_.try_lock()) {
    StayWithin::leave();
    return false;
  }
  owner_.store(std::this_thread::get_id());
  return true;
}

void PassLock::unlock() noexcept {
  giveBack();
  StayWithin::leave();
}

} // namespace pycomm
