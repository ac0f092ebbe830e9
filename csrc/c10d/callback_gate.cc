#include "c10d/callback_gate.h"

#include <pybind11/pybind11.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <ctime>
#include <string>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "c10d/python_errors.h"

namespace py = pybind11;

namespace pycomm {
namespace {

constexpr std::chrono::milliseconds kLongest{500};
constexpr std::chrono::milliseconds kEnoughCpu{2};
constexpr std::chrono::microseconds kGlance{100};
// Taking the interpreter's lock in less means that nobody held it, so a thread that sleeps does not wait for it.
constexpr std::chrono::microseconds kFree{50};

std::chrono::nanoseconds cpuTime(clockid_t clock) {
  timespec time{};
  if (::clock_gettime(clock, &time) != 0) {
    return std::chrono::nanoseconds::max(); // the thread is gone
  }
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

/// Whether the kernel has the thread asleep: the letter after the name in /proc/self/task/TID/stat.
bool sleeps(long tid) {
  const std::string path = "/proc/self/task/" + std::to_string(tid) + "/stat";
  const UniqueFd file = UniqueFd::from([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); });
  std::array<char, 256> text{};
  if (!file || ::read(file.get(), text.data(), text.size() - 1) <= 0) {
    return true;
  }
  const char* name_end = std::strrchr(text.data(), ')');
  return name_end != nullptr && name_end[1] == ' ' && name_end[2] == 'S';
}

} // namespace

struct CallbackGate::Caller {
  py::object frame;
  unsigned long ident = 0;
  long tid = 0;
  clockid_t clock{};
  std::chrono::nanoseconds cpu_before{};

  /// With the lock.
  [[nodiscard]] bool stillRuns() const {
    const py::dict frames = py::module_::import("sys").attr("_current_frames")();
    const py::int_ key(ident);
    if (!frames.contains(key)) {
      return false;
    }
    for (py::object at = frames[key]; !at.is_none(); at = at.attr("f_back")) {
      if (at.is(frame)) {
        return true;
      }
    }
    return false;
  }
};

CallbackGate::CallbackGate(std::unique_ptr<Caller> caller) : caller_(std::move(caller)) {}

CallbackGate::~CallbackGate() {
  if (!interpreterIsUsable()) {
    static_cast<void>(caller_->frame.release());
    return;
  }
  const py::gil_scoped_acquire lock;
  caller_->frame = py::object();
}

std::unique_ptr<CallbackGate> CallbackGate::ofCaller() {
  if (!interpreterIsUsable() || PyGILState_Check() == 0) {
    return nullptr;
  }
  PyFrameObject* frame = PyEval_GetFrame();
  auto caller = std::make_unique<Caller>();
  if (frame == nullptr || ::pthread_getcpuclockid(::pthread_self(), &caller->clock) != 0) {
    return nullptr;
  }
  caller->frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame));
  caller->ident = PyThread_get_thread_ident();
  caller->tid = ::syscall(SYS_gettid);
  caller->cpu_before = cpuTime(caller->clock);
  return std::unique_ptr<CallbackGate>(new CallbackGate(std::move(caller)));
}

void CallbackGate::pass() const {
  const TimePoint give_up = Clock::now() + kLongest;
  int asleep = 0; // how often in a row, although it could have had the lock
  while (asleep < 2 && Clock::now() < give_up && interpreterIsUsable()) {
    const TimePoint asked = Clock::now();
    {
      const py::gil_scoped_acquire lock;
      const bool was_free = Clock::now() - asked < kFree;
      try {
        if (!caller_->stillRuns()) {
          return;
        }
      } catch (py::error_already_set&) {
        return;
      }
      if (!was_free) {
        asleep = 0;
      }
    }
    std::this_thread::sleep_for(kGlance); // a caller that waits for the lock takes it now
    const std::chrono::nanoseconds cpu = cpuTime(caller_->clock);
    if (cpu == std::chrono::nanoseconds::max() || cpu - caller_->cpu_before > kEnoughCpu) {
      return;
    }
    asleep = sleeps(caller_->tid) ? asleep + 1 : 0;
  }
}

} // namespace pycomm
