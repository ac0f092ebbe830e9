#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "base/error.h"
#include "base/unique_fd.h"
#include "temp_folder.h"
#include "transport/rendezvous/store.h"

namespace pycomm::testing {

/// A Store for ranks that are processes of one test: one file per key, in a directory that the process which made it removes.
class DirectoryStore : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::string path = pathOf(key);
    const std::string fresh = path + "." + std::to_string(::getpid()) + ".new";
    std::ofstream(fresh, std::ios::binary) << value;
    std::filesystem::rename(fresh, path); // readers see all of it or nothing
  }

  [[nodiscard]] std::string get(const std::string& key, Deadline deadline) override {
    while (!has(key)) {
      if (deadline.expired()) {
        throw Error(ErrorCode::RendezvousTimeout, "key " + key + " did not appear");
      }
      (void)::poll(nullptr, 0, 1);
    }
    std::ifstream in(pathOf(key), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }

  [[nodiscard]] bool has(const std::string& key) override {
    return ::access(pathOf(key).c_str(), F_OK) == 0;
  }

  [[nodiscard]] int64_t add(const std::string& key, int64_t amount) override {
    const UniqueFd lock(::open((folder_.path() / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!lock || ::flock(lock.get(), LOCK_EX) != 0) {
      throw Error(ErrorCode::StoreLost, "the store's lock cannot be taken");
    }
    const int64_t value = (has(key) ? std::stoll(get(key, Deadline::never())) : 0) + amount;
    set(key, std::to_string(value));
    return value;
  }

  bool remove(const std::string& key) override {
    return ::unlink(pathOf(key).c_str()) == 0;
  }

 private:
  [[nodiscard]] std::string pathOf(std::string key) const {
    for (char& c : key) {
      c = c == '/' ? '_' : c;
    }
    return (folder_.path() / key).string();
  }

  TempFolder folder_;
};

} // namespace pycomm::testing
