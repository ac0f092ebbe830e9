#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "engine/loop/loop.h"
#include "transport/link.h"

namespace pycomm::fuzz {

/// Gives out given bytes in pieces, then closes. It drops the bytes that are written to it.
class BytesLink final : public Link {
 public:
  BytesLink(const uint8_t* bytes, size_t nbytes, size_t piece, int fd = -1)
      : bytes_(bytes), left_(nbytes), piece_(piece), fd_(fd) {}
  [[nodiscard]] int fd() const noexcept override {
    return fd_;
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override {
    Progress progress;
    for (size_t i = 0; i < count; ++i) {
      progress.nbytes += views[i].nbytes;
    }
    return progress;
  }
  [[nodiscard]] Progress tryRead(BufferView into) override {
    Progress progress;
    if (left_ == 0) {
      progress.closed = true;
      return progress;
    }
    progress.nbytes = std::min({into.nbytes, left_, piece_});
    if (progress.nbytes > 0) {
      std::memcpy(into.ptr, bytes_, progress.nbytes);
    }
    bytes_ += progress.nbytes;
    left_ -= progress.nbytes;
    return progress;
  }
  void shutdownWrite() noexcept override {}
  [[nodiscard]] std::string describe() const override {
    return "bytes";
  }

 private:
  const uint8_t* bytes_;
  size_t left_;
  const size_t piece_;
  const int fd_;
};

/// A loop whose descriptors are ready when the fuzzer says so.
class HandLoop final : public Loop {
 public:
  void watch(int fd, uint32_t, Handler& handler) override {
    handlers_[fd] = &handler;
  }
  void unwatch(int fd) noexcept override {
    handlers_.erase(fd);
  }
  void addTicker(Ticker&) override {}
  void removeTicker(Ticker&) noexcept override {}
  void addBusy(int) noexcept override {}

  [[nodiscard]] bool watches(int fd) const {
    return handlers_.count(fd) != 0;
  }
  /// False if nobody watches that descriptor any more.
  bool ready(int fd, uint32_t events) {
    const auto found = handlers_.find(fd);
    if (found == handlers_.end()) {
      return false;
    }
    found->second->onReady(events);
    return true;
  }

 private:
  std::map<int, Handler*> handlers_;
};

} // namespace pycomm::fuzz
