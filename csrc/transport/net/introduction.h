#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <string>

#include "transport/link.h"
#include "transport/net/hello.h"

namespace pycomm {

/// The connecting side of the handshake: sends its Hello, then reads the reply. One object per connection.
class Introduction {
 public:
  explicit Introduction(const Hello& hello) : size_(hello.size), group_(hello.group), bytes_(encodeHello(hello)) {}

  /// Makes as much progress as `link` allows; true once the peer has accepted. Reads nothing beyond the reply. Throws
  /// Error(ConnectionReset) if the peer dropped the connection before it replied, the peer's reason if it refused,
  /// Error(VersionMismatch) if another version of pycomm replied, and Error(ProtocolViolation) if the reply is invalid.
  [[nodiscard]] bool advance(Link& link);
  /// The event to poll for on link.fd() before the next advance().
  [[nodiscard]] short event() const noexcept {
    return !refused_ && written_ < bytes_.size() ? POLLOUT : POLLIN;
  }

 private:
  [[nodiscard]] bool read(Link& link, std::byte* into, size_t nbytes, size_t& got) const;

  int size_;
  uint32_t group_;
  std::string bytes_; ///< the Hello, then the reply's payload
  size_t written_ = 0;
  std::array<std::byte, sizeof(FrameHeader)> header_{}; ///< of the reply
  size_t header_got_ = 0;
  size_t payload_got_ = 0;
  bool refused_ = false; ///< bytes_ is the refusal's payload; payload_got_ bytes of it have arrived
};

} // namespace pycomm
