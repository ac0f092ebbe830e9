#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "transport/link.h"

namespace pycomm {

/// One byte stream over several connections to one peer, which may use an interface each. Chunk k travels on connection k modulo their
/// number. Both ends count bytes, so nothing on the wire says where a chunk belongs, and reading in order puts it together:
///
///   chunk        0    1    2    3    4         chunks are small beside the kernel's buffers: while this end waits for room on
///   connection   0    1    0    1    0         one connection, the others still have something to send
///
/// It is as fast as its slowest connection times their number, and it breaks where one of them does: then the error says which.
class StripedLink final : public Link {
 public:
  static constexpr size_t kChunkNbytes = 64 << 10;

  struct Part {
    std::unique_ptr<Link> link;
    std::string interface_name; ///< for messages
  };

  enum class State { Connecting, Connected };
  /// At least one part; the same number, in the same order, at both ends. The end that connects calls finishConnect().
  StripedLink(std::vector<Part> parts, State state);

  [[nodiscard]] int fd() const noexcept override {
    return parts_.front().link->fd();
  }
  [[nodiscard]] int readFd() const noexcept override {
    return parts_[reading_.part].link->readFd();
  }
  [[nodiscard]] int writeFd() const noexcept override {
    return turn().writeFd();
  }
  [[nodiscard]] short roomEvent() const noexcept override {
    return turn().roomEvent();
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override;
  [[nodiscard]] Progress tryRead(BufferView into) override;
  void shutdownWrite() noexcept override;
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
    size_t left = kChunkNbytes; ///< of the chunk under way
    void advance(size_t nbytes, size_t parts) noexcept;
  };
  /// The part that connects, or else the one that the next byte leaves by.
  [[nodiscard]] const Link& turn() const noexcept {
    return *parts_[connected_ < parts_.size() ? connected_ : writing_.part].link;
  }
  template <typename Body>
  auto naming(size_t part, const Body& body);

  std::vector<Part> parts_;
  size_t connected_; ///< parts before this one are
  Place reading_;
  Place writing_;
};

} // namespace pycomm
