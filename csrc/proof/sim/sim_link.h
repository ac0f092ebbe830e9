#pragma once

#include <string>

#include "base/error.h"
#include "proof/sim/network.h"

namespace pycomm::sim {

/// One end of a simulated connection.
class SimLink final : public Link {
 public:
  SimLink(Network& network, int fd) noexcept : network_(network), fd_(fd) {}
  ~SimLink() override {
    if (!gentle_) {
      network_.close(fd_);
    }
  }
  SimLink(const SimLink&) = delete;
  SimLink& operator=(const SimLink&) = delete;

  [[nodiscard]] int fd() const noexcept override {
    return fd_;
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override {
    return network_.write(fd_, views, count);
  }
  [[nodiscard]] Progress tryRead(BufferView into) override {
    return network_.read(fd_, into);
  }
  void shutdownWrite() noexcept override {
    network_.shutdown(fd_);
  }
  /// Does not block: virtual time advances only after the caller returns. The end stays open until the peer closes, for
  /// at most 20 ms.
  void closeGently() noexcept override {
    gentle_ = true;
    network_.drainAndClose(fd_);
  }
  [[nodiscard]] bool finishConnect() override {
    if (network_.end(fd_).refused) {
      throw Error(ErrorCode::ConnectFailed, "Nobody listens at rank " + std::to_string(network_.end(fd_).peer) + ".");
    }
    return network_.end(fd_).connected;
  }
  [[nodiscard]] std::string describe() const override {
    return "rank " + std::to_string(network_.end(fd_).rank) + " -> rank " + std::to_string(network_.end(fd_).peer);
  }

 private:
  Network& network_; ///< the run's, which outlives all links
  const int fd_;
  bool gentle_ = false;
};

} // namespace pycomm::sim
