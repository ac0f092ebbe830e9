#include "base/fault_point.h"

#include "base/error.h"

#ifdef PYCOMM_FAULT_POINTS

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <new>
#include <sstream>
#include <thread>
#include <utility>

namespace pycomm {
namespace {

enum class Action { Kill, Stop, Exit, Delay, Hold, NoMemory, Errno, Short, Flip };

struct ArmedPoint {
  std::string text; ///< as it was given
  std::string site;
  int64_t first = 1; ///< the visit at which it strikes
  bool later_too = false;
  Action action = Action::Kill;
  int number = 0; ///< milliseconds, or an errno
  int64_t visits = 0;
  int64_t strikes = 0;
};

constexpr int kExitCode = 77;
constexpr std::chrono::seconds kLongestHold{60};

std::mutex g_mutex; ///< guards the next two
std::vector<ArmedPoint> g_points;
uint64_t g_armings = 0; ///< calls of armFaultPoints()
std::condition_variable g_armed_anew;
std::atomic<bool> g_armed{false};

/// All of this program; complete when main() begins.
std::vector<std::string>& sites() {
  static std::vector<std::string> names;
  return names;
}

constexpr std::pair<const char*, int> kErrnos[] = {
    {"EAGAIN", EAGAIN},
    {"ECONNABORTED", ECONNABORTED},
    {"ECONNREFUSED", ECONNREFUSED},
    {"ECONNRESET", ECONNRESET},
    {"EHOSTUNREACH", EHOSTUNREACH},
    {"EINTR", EINTR},
    {"EIO", EIO},
    {"EMFILE", EMFILE},
    {"ENETUNREACH", ENETUNREACH},
    {"ENFILE", ENFILE},
    {"ENOBUFS", ENOBUFS},
    {"ENOMEM", ENOMEM},
    {"ENOSPC", ENOSPC},
    {"EPIPE", EPIPE},
    {"ETIMEDOUT", ETIMEDOUT},
    {"EADDRINUSE", EADDRINUSE},
    {"EACCES", EACCES},
    {"EADDRNOTAVAIL", EADDRNOTAVAIL},
};

[[noreturn]] void unreadable(const std::string& part, const std::string& why) {
  throw Error(
      ErrorCode::InvalidArgument,
      "PYCOMM_FAULT: '" + part + "' cannot be read: " + why,
      "site:nth:action, as socket.write:3:errno=EPIPE; actions: kill, stop, exit, delay=MS, hold, nomem, errno=NAME, short, flip");
}

int64_t numberIn(const std::string& part, const std::string& digits) {
  if (digits.empty() || digits.size() > 9 || digits.find_first_not_of("0123456789") != std::string::npos) {
    unreadable(part, "'" + digits + "' is no number");
  }
  return std::stoll(digits);
}

void readAction(const std::string& part, const std::string& text, ArmedPoint& point) {
  const size_t sign = text.find('=');
  const std::string name = text.substr(0, sign);
  const std::string value = sign == std::string::npos ? "" : text.substr(sign + 1);
  constexpr std::pair<const char*, Action> kPlain[] = {
      {"kill", Action::Kill},
      {"stop", Action::Stop},
      {"exit", Action::Exit},
      {"hold", Action::Hold},
      {"nomem", Action::NoMemory},
      {"short", Action::Short},
      {"flip", Action::Flip}};
  for (const auto& entry : kPlain) {
    if (text == entry.first) {
      point.action = entry.second;
      return;
    }
  }
  if (name == "delay") {
    point.action = Action::Delay;
    point.number = static_cast<int>(numberIn(part, value));
    return;
  }
  if (name == "errno") {
    point.action = Action::Errno;
    for (const auto& entry : kErrnos) {
      if (value == entry.first) {
        point.number = entry.second;
        return;
      }
    }
    unreadable(part, "no errno '" + value + "'");
  }
  unreadable(part, "no action '" + text + "'");
}

ArmedPoint readPoint(const std::string& part) {
  const size_t first = part.find(':');
  const size_t second = first == std::string::npos ? first : part.find(':', first + 1);
  if (first == 0 || second == std::string::npos) {
    unreadable(part, "it is not site:nth:action");
  }
  ArmedPoint point;
  point.text = part;
  point.site = part.substr(0, first);
  if (std::find(sites().begin(), sites().end(), point.site) == sites().end()) {
    unreadable(part, "there is no site '" + point.site + "'");
  }
  std::string nth = part.substr(first + 1, second - first - 1);
  if (!nth.empty() && nth.back() == '+') {
    point.later_too = true;
    nth.pop_back();
  }
  point.first = numberIn(part, nth);
  if (point.first < 1) {
    unreadable(part, "visits are counted from 1");
  }
  readAction(part, part.substr(second + 1), point);
  return point;
}

// The armed points that take their action at this visit, and the arming that they are of.
std::vector<ArmedPoint> struckAt(const char* site, uint64_t& arming) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  std::vector<ArmedPoint> struck;
  arming = g_armings;
  for (ArmedPoint& point : g_points) {
    if (point.site != site) {
      continue;
    }
    ++point.visits;
    if (point.visits == point.first || (point.later_too && point.visits > point.first)) {
      ++point.strikes;
      struck.push_back(point);
    }
  }
  return struck;
}

void holdUntilArmedAnew(uint64_t arming) {
  std::unique_lock<std::mutex> lock(g_mutex);
  (void)g_armed_anew.wait_for(lock, kLongestHold, [arming] { return g_armings != arming; });
}

[[noreturn]] void endHere() {
  static_cast<void>(::kill(::getpid(), SIGKILL));
  for (;;) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
}

} // namespace

bool faultPointsBuiltIn() noexcept {
  return true;
}

bool rememberFaultSite(const char* site) {
  sites().emplace_back(site);
  return true;
}

void armFaultPoints(const std::string& spec) {
  std::vector<ArmedPoint> points;
  std::istringstream parts(spec);
  for (std::string part; std::getline(parts, part, ',');) {
    points.push_back(readPoint(part));
  }
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_points = std::move(points);
  g_armed.store(!g_points.empty());
  ++g_armings;
  g_armed_anew.notify_all();
}

std::vector<FaultPointTally> faultPointTallies() {
  const std::lock_guard<std::mutex> lock(g_mutex);
  std::vector<FaultPointTally> tallies;
  for (const ArmedPoint& point : g_points) {
    tallies.push_back({point.text, point.visits, point.strikes});
  }
  return tallies;
}

Fault visitFaultPoint(const char* site) {
  Fault fault;
  if (!g_armed.load()) {
    return fault;
  }
  uint64_t arming = 0;
  for (const ArmedPoint& point : struckAt(site, arming)) {
    switch (point.action) {
      case Action::Kill:
        endHere();
      case Action::Stop:
        static_cast<void>(::kill(::getpid(), SIGSTOP));
        break;
      case Action::Exit:
        ::_exit(kExitCode);
      case Action::Delay:
        std::this_thread::sleep_for(std::chrono::milliseconds(point.number));
        break;
      case Action::Hold:
        holdUntilArmedAnew(arming);
        break;
      case Action::NoMemory:
        throw std::bad_alloc();
      case Action::Errno:
        fault.error_number = point.number;
        break;
      case Action::Short:
        fault.shorten = true;
        break;
      case Action::Flip:
        fault.flip = true;
        break;
    }
  }
  return fault;
}

void passFaultPoint(const char* site) {
  const Fault fault = visitFaultPoint(site);
  if (fault.error_number != 0) {
    ErrorRecord record;
    record.code = ErrorCode::SystemError;
    record.summary = std::string("a test let ") + site + " fail";
    record.cause = errnoText(fault.error_number);
    throw Error(record);
  }
}

void flipBit(void* bytes, size_t nbytes) noexcept {
  if (nbytes > 0) {
    auto* last = static_cast<unsigned char*>(bytes) + (nbytes - 1);
    *last = static_cast<unsigned char>(*last ^ 1U);
  }
}

} // namespace pycomm

#else

namespace pycomm {

bool faultPointsBuiltIn() noexcept {
  return false;
}

void armFaultPoints(const std::string&) {
  throw Error(
      ErrorCode::Unsupported,
      "PYCOMM_FAULT is set, and this is not a test build of pycomm: it has no fault points",
      "unset PYCOMM_FAULT; tests use what `make fault_build` builds");
}

std::vector<FaultPointTally> faultPointTallies() {
  return {};
}

} // namespace pycomm

#endif
