#include "engine/report/flight_recorder.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/log.h"
#include "base/unique_fd.h"
#include "engine/report/flight_json.h"

namespace pycomm {
namespace {

// Of groups that are closed, the last ones are kept.
constexpr size_t kKeepClosed = 8;
constexpr int kFormatVersion = 3;

int64_t steadyNs(TimePoint at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

int64_t wallNowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

[[noreturn]] void cannotWrite(const std::string& path, const std::string& cause) {
  ErrorRecord record;
  record.code = ErrorCode::SystemError;
  record.summary = "The flight record could not be written to " + path + ".";
  record.cause = cause;
  record.hint = "name another folder with PYCOMM_FLIGHT_RECORDER_DIR";
  throw Error(record);
}

void writeFile(const std::string& path, const std::string& text) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code problem;
  if (!folder.empty() && !std::filesystem::create_directories(folder, problem) && problem) {
    cannotWrite(path, problem.message());
  }
  // Under another name until it is whole. A name of this process's own, and never through somebody's link: the folder may be /tmp.
  const std::string partial = path + "." + std::to_string(::getpid()) + ".partial";
  static_cast<void>(::unlink(partial.c_str()));
  const UniqueFd file =
      UniqueFd::from([&] { return ::open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600); });
  auto good = static_cast<bool>(file);
  for (size_t done = 0; good && done < text.size();) {
    const ssize_t wrote = ::write(file.get(), text.data() + done, text.size() - done);
    good = wrote > 0 || (wrote < 0 && errno == EINTR);
    done += wrote > 0 ? static_cast<size_t>(wrote) : 0;
  }
  if (!good || std::rename(partial.c_str(), path.c_str()) != 0) {
    const std::string cause = errnoText(errno);
    static_cast<void>(::unlink(partial.c_str()));
    cannotWrite(path, cause);
  }
}

} // namespace

FlightRecorder::FlightRecorder(CallbackPool& callbacks)
    : callbacks_(callbacks), steady_anchor_(Clock::now()), wall_anchor_ns_(wallNowNs()) {}

std::shared_ptr<FlightLog> FlightRecorder::open(FlightLog::Subject subject) {
  std::shared_ptr<FlightLog> log = FlightLog::open(std::move(subject));
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto closed = [](const std::shared_ptr<FlightLog>& entry) { return entry->closed(); };
  auto spare = std::count_if(logs_.begin(), logs_.end(), closed) - static_cast<std::ptrdiff_t>(kKeepClosed);
  logs_.erase(
      std::remove_if(logs_.begin(), logs_.end(), [&](const auto& entry) { return entry->closed() && spare-- > 0; }),
      logs_.end());
  logs_.push_back(log);
  return log;
}

FlightRecorder::Logs FlightRecorder::logs() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return logs_;
}

std::string FlightRecorder::json(const FlightLog* only) const {
  Logs chosen = logs();
  const int rank = chosen.empty() ? 0 : chosen.front()->subject().jobRank();
  if (only != nullptr) {
    chosen.erase(
        std::remove_if(chosen.begin(), chosen.end(), [&](const auto& log) { return log.get() != only; }), chosen.end());
  }
  return jsonOfLogs(chosen, only != nullptr ? only->subject().jobRank() : rank, false);
}

std::string FlightRecorder::report() const {
  Logs open = logs();
  open.erase(std::remove_if(open.begin(), open.end(), [](const auto& log) { return log->closed(); }), open.end());
  return jsonOfLogs(open, open.empty() ? 0 : open.front()->subject().jobRank(), true);
}

std::string FlightRecorder::jsonOfLogs(const Logs& logs, int job_rank, bool brief) const {
  const WallClock clock{steadyNs(steady_anchor_), wall_anchor_ns_};
  const int64_t now = clock.at(steadyNs(Clock::now()));
  std::string out = "{\"format\":\"pycomm-flight-record\",\"version\":" + std::to_string(kFormatVersion) +
      ",\"rank\":" + std::to_string(job_rank) + ",\"host\":" + jsonText(localHostName()) +
      ",\"pid\":" + std::to_string(::getpid()) + ",\"written_ns\":" + std::to_string(now) +
      ",\"clock\":{\"wall_ns\":" + std::to_string(wall_anchor_ns_) +
      ",\"monotonic_ns\":" + std::to_string(clock.steady_anchor_ns) + "},\"groups\":[";
  bool first = true;
  for (const auto& log : logs) {
    const FlightLog::Snapshot snapshot = brief ? log->readBrief(kReportPending, kReportEnded) : log->read();
    out += std::exchange(first, false) ? "\n" : ",\n";
    out += jsonOf(log->subject(), snapshot, clock);
  }
  return out + "\n]}\n";
}

void FlightRecorder::write(const std::string& path) const {
  const std::lock_guard<std::mutex> lock(write_mutex_);
  writeFile(path, json());
}

void FlightRecorder::failed(const std::shared_ptr<FlightLog>& log, const ErrorRecord& record) noexcept {
  try {
    log->failed(record);
    // Many groups may fail at once; one file has them all.
    if (!log->subject().dump_prefix.empty() && !dump_waits_.exchange(true)) {
      callbacks_.submit([this, log] { dump(*log); });
    }
  } catch (...) { // no memory, or no thread: the failure itself is reported all the same
    dump_waits_.store(false);
  }
}

std::optional<ErrorRecord> FlightRecorder::failedBeside(const FlightLog& log) const {
  std::optional<ErrorRecord> first;
  int64_t first_ns = INT64_MAX;
  const int64_t long_ago_ns = steadyNs(Clock::now() - kRemembered); // it had time to go on without that group
  for (const auto& other : logs()) {
    const int64_t failed_ns = other->reachedNs(GroupPhase::Failed);
    const bool beside = other.get() != &log && failed_ns > log.reachedNs(GroupPhase::Ready) && failed_ns > long_ago_ns;
    if (auto failure = other->failure(); beside && failure && failed_ns < first_ns) {
      first_ns = failed_ns;
      first = std::move(failure);
    }
  }
  return first;
}

void FlightRecorder::dump(const FlightLog& failed) noexcept {
  const FlightLog::Subject& subject = failed.subject();
  try {
    const std::string path = subject.dump_prefix + std::to_string(subject.jobRank()) + ".json";
    {
      const std::lock_guard<std::mutex> lock(write_mutex_);
      dump_waits_.store(false);
      writeFile(path, json());
    }
    if (!told_.exchange(true)) {
      log(LogLevel::Warn,
          "the last operations of rank " + std::to_string(subject.jobRank()) + " are in " + path +
              "; read them, best with those of all ranks, by: python -m pycomm trace " +
              (path.find('/') == std::string::npos ? "." : path.substr(0, path.rfind('/') + 1)));
    }
  } catch (const std::exception& error) {
    if (!told_.exchange(true)) {
      log(LogLevel::Warn, error.what());
    }
  }
}

} // namespace pycomm
