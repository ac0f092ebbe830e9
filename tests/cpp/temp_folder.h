#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>

namespace pycomm::testing {

/// An empty folder that no other process makes; it goes, with all that is in it, when this object does. A forked child's copy of the
/// object leaves it.
class TempFolder {
 public:
  TempFolder() : owner_(::getpid()) {
    std::string pattern = (std::filesystem::temp_directory_path() / "pycomm_test_XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) {
      throw std::runtime_error("no folder could be made at " + pattern);
    }
    path_ = pattern;
  }
  ~TempFolder() {
    if (owner_ == ::getpid()) {
      std::error_code ignored;
      std::filesystem::remove_all(path_, ignored);
    }
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const noexcept {
    return path_;
  }

 private:
  pid_t owner_;
  std::filesystem::path path_;
};

} // namespace pycomm::testing
