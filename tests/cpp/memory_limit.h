#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "base/process_limits.h"

namespace pycomm::testing {

/// A control group with a memory limit, below that of this process. For processes that end before this does.
class MemoryLimit {
 public:
  explicit MemoryLimit(uint64_t nbytes) {
    // The first folder that is there and has memory limits is this process's own.
    forEachControlGroup(ownControlGroups(), "memory", "/sys/fs/cgroup", [&](const std::string& folder) {
      for (const char* limit : {"memory.max", "memory.limit_in_bytes"}) {
        const std::filesystem::path group = folder + "/pycomm-test-" + std::to_string(::getpid());
        std::error_code error;
        if (made_.empty() && std::filesystem::create_directory(group, error)) {
          if (std::ofstream(group / limit, std::ios::in) << nbytes << std::flush) {
            made_ = group;
          } else {
            std::filesystem::remove(group, error);
          }
        }
      }
    });
  }
  ~MemoryLimit() {
    for (int i = 0; i < 200 && !made_.empty() && ::rmdir(made_.c_str()) != 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20)); // the kernel is not done with the processes yet
    }
  }
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;

  /// False if this user cannot make one here.
  [[nodiscard]] bool made() const {
    return !made_.empty();
  }
  /// For the calling process and its children: true if it is in the group now.
  [[nodiscard]] bool join() const {
    return static_cast<bool>(std::ofstream(made_ / "cgroup.procs") << ::getpid() << std::flush);
  }

 private:
  std::filesystem::path made_;
};

} // namespace pycomm::testing
