#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "transport/link.h"

namespace pycomm {

/// One byte stream over several connections to one peer; each connection may use an interface of its own. Chunk k
/// travels on connection k modulo their number. Both ends count bytes, so the frames need no chunk numbers: the reader
/// takes the chunks from the connections in order.
///
///   chunk        0    1    2    3    4
///   connection   0    1    0    1    0
///
/// Chunks are small beside the kernel's buffers: while this end waits for room on one connection, the others still have
/// bytes to send.
///
/// Its speed is that of its slowest connection times their number. It breaks if one of them does; the error then names
/// that connection.
class StripedLink final : public Link {
 public:
  static constexpr size_t kChunkNbytes = 64 << 10;

  struct Part {
    std::unique_ptr<Link> link;
    std::string interface_name; ///< for error texts
  };

  enum class State { Connecting, Connected };
  /// At least one part; the same number, in the same order, at both ends. The connecting end calls finishConnect().
  StripedLink(std::vector<Part> parts, State state);

  [[nodiscard]] int fd() const noexcept override {
    return parts_.front().link->fd();
  }
  [[nodiscard]] int readFd() const noexcept override {
    return parts_[reading_.part].link->readFd();
  }
  [[nodiscard]] int writeFd() const noexcept override {
    return parts_[turn()].link->writeFd();
  }
  [[nodiscard]] short roomEvent() const noexcept override {
    return parts_[turn()].link->roomEvent();
  }
  [[nodiscard]] bool buffered() const noexcept override {
    return parts_[reading_.part].link->buffered();
  }
  [[nodiscard]] bool unsent() const noexcept override {
    return parts_[owing_].link->unsent();
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override;
  [[nodiscard]] Progress tryRead(BufferView into) override;
  void shutdownWrite() noexcept override;
  /// Of the connection that writeFd() is of.
  [[nodiscard]] bool isReset() noexcept override {
    return parts_[turn()].link->isReset();
  }
  /// True once all parts are connected.
  [[nodiscard]] bool finishConnect() override;
  [[nodiscard]] std::string describe() const override;
  [[nodiscard]] std::string readsFrom() const override {
    return parts_[reading_.part].interface_name;
  }
  [[nodiscard]] std::string writesTo() const override {
    return parts_[writing_.part].interface_name;
  }

 private:
  struct Place {
    size_t part = 0;
    size_t left = kChunkNbytes; ///< of the current chunk
    void advance(size_t nbytes, size_t parts) noexcept;
  };
  /// The part that is connecting, or else the one that the next byte leaves on.
  [[nodiscard]] size_t turn() const noexcept {
    return connected_ < parts_.size() ? connected_ : unsent() ? owing_ : writing_.part;
  }
  template <typename Body>
  auto naming(size_t part, const Body& body);

  std::vector<Part> parts_;
  size_t connected_; ///< the parts before this index are connected
  Place reading_;
  Place writing_;
  size_t owing_ = 0; ///< the part that was written last: no other has bytes that are unsent()
};

} // namespace pycomm
