#pragma once

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "base/deadline.h"
#include "sanitized.h"
#include "temp_folder.h"

namespace pycomm::testing {

/// 256 bytes that follow from `seed`, none of them 0: who knows the seed can look for them.
inline std::string patternOf(int64_t seed) {
  std::string pattern;
  uint64_t state = static_cast<uint64_t>(seed) * 0x9e3779b97f4a7c15U + 1;
  while (pattern.size() < 256) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    pattern.push_back(static_cast<char>(state >> 57 | 1));
  }
  return pattern;
}

/// The core file of a forked child that runs `crash`, which must end it with a signal. The child's limit on core files lets through
/// kAllowedNbytes more than it had resident, and 64 MiB on top: a test that fails fills no disk.
class CoreFile {
 public:
  static constexpr int64_t kAllowedNbytes = int64_t{10} << 20;
  /// In the memory of every such child.
  static constexpr const char* kMark = "a core file of a test of pycomm";

  explicit CoreFile(const std::function<void()>& crash) {
    std::string pattern;
    std::ifstream("/proc/sys/kernel/core_pattern") >> pattern;
    if (kSanitized) {
      unavailable_ = "sanitizers write no core files";
    } else if (pattern.empty() || pattern[0] == '|' || pattern.find('/') != std::string::npos) {
      unavailable_ = "core files do not go to the working directory here, but to " + pattern;
    }
    const pid_t pid = ::fork();
    if (pid == 0) {
      prepare();
      crash();
      ::_exit(0); // did not crash
    }
    int status = 0;
    const Deadline deadline = Deadline::after(60000);
    while (::waitpid(pid, &status, WNOHANG) == 0) {
      if (deadline.expired()) {
        (void)::kill(pid, SIGKILL);
      }
      ::usleep(1000);
    }
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      if (entry.path().filename().string().rfind("core", 0) == 0) {
        path_ = entry.path().string();
      }
    }
    if (path_.empty() && unavailable_.empty()) {
      unavailable_ = "the kernel wrote no core file; the process ended with status " + std::to_string(status);
    }
    std::ifstream(folder_.path() / "resident") >> resident_nbytes_;
  }

  /// Why there is none; empty if there is one.
  [[nodiscard]] const std::string& unavailable() const {
    return unavailable_;
  }
  /// What it takes on the disk.
  [[nodiscard]] int64_t nbytes() const {
    struct stat status{};
    return ::stat(path_.c_str(), &status) == 0 ? int64_t{status.st_blocks} * 512 : -1;
  }
  /// Of the child, when recordResident() was last called.
  [[nodiscard]] int64_t residentNbytes() const {
    return resident_nbytes_;
  }
  [[nodiscard]] bool contains(const std::string& text) const {
    std::ifstream file(path_, std::ios::binary);
    std::string window;
    std::string piece(size_t{1} << 20, 0);
    while (file.read(piece.data(), static_cast<std::streamsize>(piece.size())) || file.gcount() > 0) {
      window.append(piece, 0, static_cast<size_t>(file.gcount()));
      if (window.find(text) != std::string::npos) {
        return true;
      }
      window.erase(0, window.size() - std::min(window.size(), text.size()));
    }
    return false;
  }

  /// In the child, in the folder where its core file will be: writes down what it has resident now.
  static void recordResident() {
    int64_t pages = 0;
    int64_t resident = 0;
    std::ifstream("/proc/self/statm") >> pages >> resident;
    resident *= ::sysconf(_SC_PAGESIZE);
    std::ofstream("resident") << resident;
    const auto most = static_cast<rlim_t>(resident + kAllowedNbytes + (int64_t{64} << 20));
    const rlimit limit{most, most};
    (void)::setrlimit(RLIMIT_CORE, &limit);
  }

 private:
  void prepare() const {
    static std::string mark;
    mark = kMark;
    if (::chdir(folder_.path().c_str()) != 0) {
      ::_exit(2);
    }
    recordResident();
  }

  TempFolder folder_;
  std::string path_;
  std::string unavailable_;
  int64_t resident_nbytes_ = 0;
};

} // namespace pycomm::testing
