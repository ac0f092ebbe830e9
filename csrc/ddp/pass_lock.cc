#include "ddp/pass_lock.h"

#include <c10/util/Exception.h>

#include "base/deadline.h"
#include "base/wait_point.h"
#include "c10d/process_end.h"
#include "c10d/without_gil.h"
#include "engine/operation/issue_context.h"

namespace pycomm {
namespace {

// A daemon thread may have stayed in the turn for good, as in a comm hook that waits for another rank.
constexpr int64_t kPatienceAtEndMs = 3000;
constexpr std::chrono::milliseconds kTryEvery{5};

} // namespace

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
    if (!take(endsProcess() ? Deadline::after(kPatienceAtEndMs) : Deadline::never())) {
      StayWithin::leave();
      TORCH_CHECK(
          false,
          "the process ends while another thread, a daemon, is in a backward pass of this DistributedDataParallel wrapper. "
          "Try: join that thread before the program ends");
    }
  }
}

bool PassLock::take(Deadline deadline) noexcept {
  const WithoutGil no_gil;
  beforeWait();
  if (deadline.isNever()) {
    mutex_.lock();
  }
  while (!deadline.isNever() && !mutex_.try_lock()) {
    if (deadline.expired()) {
      return false;
    }
    std::this_thread::sleep_for(kTryEvery);
  }
  owner_.store(std::this_thread::get_id());
  return true;
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
