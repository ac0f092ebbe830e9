#include "base/native_thread.h"

#include <pthread.h>

#include <csignal>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"

namespace pycomm {
namespace {

/// The calling thread's signal mask while this lives; a thread that is started meanwhile inherits it.
class Masked {
 public:
  explicit Masked(SignalMask mask) noexcept {
    sigset_t more;
    sigemptyset(&more);
    if (mask == SignalMask::All) {
      sigfillset(&more);
    }
    pthread_sigmask(SIG_BLOCK, &more, &before_);
  }
  ~Masked() {
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  Masked(const Masked&) = delete;
  Masked& operator=(const Masked&) = delete;

 private:
  sigset_t before_;
};

} // namespace

std::thread startNativeThread(const std::string& name, std::function<void()> body, SignalMask mask) {
  try {
    const Masked masked(mask);
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
