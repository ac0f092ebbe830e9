#include "engine/survive/peers_file.h"

#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "base/native_thread.h"

namespace pycomm {

struct PeersFile::Shared {
  Shared(std::string file, const ProcessId& writer) : path(std::move(file)), draft(path + "." + writer) {}

  void run() noexcept;
  void replace(const std::string& text);
  void refused(const std::exception& error) const noexcept;

  const std::string path;
  const std::string draft;
  std::mutex mutex; ///< guards the rest
  std::condition_variable changed;
  std::optional<std::string> next;
  bool writes = false; ///< the thread runs
  bool closed = false;
};

PeersFile::PeersFile(std::string path, const ProcessId& writer)
    : shared_(std::make_shared<Shared>(std::move(path), writer)) {}

PeersFile::~PeersFile() {
  close(Deadline::after(0));
}

void PeersFile::write(std::string text) {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (shared_->closed) {
    return;
  }
  shared_->next = std::move(text);
  if (shared_->writes) {
    return;
  }
  try {
    startNativeThread("pycomm-peers", [shared = shared_] { shared->run(); }).detach();
    shared_->writes = true;
  } catch (const std::exception& error) { // at the next change, then
    shared_->refused(error);
  }
}

bool PeersFile::flush(Deadline deadline) {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  return shared_->changed.wait_until(lock, deadline.instant(), [this] { return !shared_->writes; });
}

void PeersFile::close(Deadline deadline) noexcept {
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->closed = true;
    shared_->next.reset();
  }
  (void)flush(deadline);
}

void PeersFile::Shared::run() noexcept {
  for (;;) {
    std::string text;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!next) {
        writes = false;
        changed.notify_all();
        return;
      }
      text = *std::exchange(next, std::nullopt);
    }
    try {
      replace(text);
    } catch (const std::exception& error) {
      refused(error);
    }
  }
}

void PeersFile::Shared::refused(const std::exception& error) const noexcept {
  try {
    log(LogLevel::Warn,
        "the handles of the elastic group's members could not be written to " + path + " (" + error.what() +
            "), so processes that read it may not find them. Try: a folder that exists, and may be written to, on a disk with room");
  } catch (const std::exception&) { // no memory for a text
  }
}

// Under another name first, so that who reads it finds all or nothing.
void PeersFile::Shared::replace(const std::string& text) {
  PYCOMM_FAULT_POINT("survive.peers");
  const auto fails = [&](const char* what) {
    const int why = errno;
    (void)std::remove(draft.c_str());
    return Error(systemError(ErrorCode::SystemError, what, why));
  };
  std::FILE* const file = std::fopen(draft.c_str(), "we");
  if (file == nullptr) {
    throw fails("no file can be made there");
  }
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (std::fclose(file) != 0 || !written) {
    throw fails("the disk has not taken it");
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (closed) { // by now another member may have written it
      (void)std::remove(draft.c_str());
      return;
    }
  }
  if (std::rename(draft.c_str(), path.c_str()) != 0) {
    throw fails("it cannot be replaced");
  }
}

} // namespace pycomm
