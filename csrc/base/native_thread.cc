#include "base/native_thread.h"

#include <pthread.h>

#include <csignal>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"

namespace pycomm {
namespace {

/// Blocks all signals on the calling thread while it lives; a thread that is started meanwhile inherits that.
class BlockedSignals {
 public:
  BlockedSignals() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() {
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

} // namespace

std::thread startNativeThread(const std::string& name, std::function<void()> body) {
  try {
    const BlockedSignals blocked;
    const Fault fault = PYCOMM_FAULT("thread.start");
    if (fault.error_number != 0) {
      throw std::system_error(fault.error_number, std::generic_category());
    }
    return std::thread([short_name = name.substr(0, 15), body = std::move(body)] {
      pthread_setname_np(pthread_self(), short_name.c_str());
      body();
    });
  } catch (const std::system_error& error) {
    ErrorRecord record;
    record.code = ErrorCode::SystemError;
    record.summary = "this process could not start a thread, " + name;
    record.cause = errnoText(error.code().value());
    record.hint = "raise the limit on processes and threads (ulimit -u, or pids.max of the container)";
    throw Error(record);
  }
}

} // namespace pycomm
