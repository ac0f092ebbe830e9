#include "ddp/pass_lock.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <chrono>

#include "base/deadline.h"
#include "base/wait_point.h"
#include "c10d/interruptible.h"
#include "c10d/process_end.h"
#include "c10d/python_errors.h"
#include "c10d/without_gil.h"
#include "engine/operation/issue_context.h"

namespace pycomm {
namespace {

// A daemon thread may have stayed in the turn for good, as in a comm hook that waits for another rank.
constexpr int64_t kPatienceAtEndMs = 3000;

bool inCallback() noexcept {
  return IssueContext::current() != nullptr;
}

} // namespace

void PassLock::lock(bool brief) {
  if (try_lock(brief)) {
    return;
  }
  TORCH_CHECK(
      owner_.load() != std::this_thread::get_id(),
      "a signal handler or a comm hook called a DistributedDataParallel wrapper on the thread that runs its backward pass. "
      "Try: set a flag there, and call the wrapper between two passes; stats() may be called at any time");
  StayWithin::enter();
  auto leave = c10::make_scope_exit([] { StayWithin::leave(); });
  await(brief);
  leave.release();
}

void PassLock::await(bool brief) {
  const WithoutGil no_gil;
  const Deadline deadline = endsProcess() ? Deadline::after(kPatienceAtEndMs) : Deadline::never();
  do {
    TORCH_CHECK(
        !(inCallback() && refusesCallbacks()),
        "a comm hook or a callback of a future called a DistributedDataParallel wrapper whose backward pass is under way, "
        "and may wait for it. Try: call the wrapper between two passes; stats() may be called at any time");
    TORCH_CHECK(
        !deadline.expired(),
        "the process ends while another thread, a daemon, is in a backward pass of this DistributedDataParallel wrapper. "
        "Try: join that thread before the program ends");
    checkSignals();
    beforeWait();
  } while (!takeWithin(deadline.remainingMs(Interruptible::kEveryMs), brief));
}

bool PassLock::takeWithin(int64_t ms, bool brief) noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!given_back_.wait_for(lock, std::chrono::milliseconds(ms), [this] { return !taken_; })) {
    return false;
  }
  taken_ = true;
  brief_.store(brief);
  owner_.store(std::this_thread::get_id());
  return true;
}

void PassLock::giveBack() noexcept {
  owner_.store(std::thread::id());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    taken_ = false;
  }
  given_back_.notify_one();
}

PassLock::Interval::~Interval() {
  const WithoutGil no_gil;
  do {
    beforeWait();
  } while (!lock_.takeWithin(Interruptible::kEveryMs, /*brief=*/false));
}

bool PassLock::refuses() const noexcept {
  return owner_.load() == std::this_thread::get_id() || (inCallback() && refusesCallbacks());
}

bool PassLock::try_lock(bool brief) noexcept {
  if (owner_.load() == std::this_thread::get_id()) {
    return false;
  }
  StayWithin::enter(); // which may not return: before the turn is taken
  if (!takeWithin(0, brief)) {
    StayWithin::leave();
    return false;
  }
  return true;
}

void PassLock::unlock() noexcept {
  giveBack();
  StayWithin::leave();
}

} // namespace pycomm
