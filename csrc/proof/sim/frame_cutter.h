#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "transport/frame_header.h"

namespace pycomm::sim {

/// Follows a byte stream and finds its frames.
class FrameCutter {
 public:
  /// Calls `frame(header)` for each header that `bytes` complete, and `payload(bytes, nbytes)` for each piece of a payload.
  template <typename Frame, typename Payload>
  void feed(const std::byte* bytes, size_t nbytes, const Frame& frame, const Payload& payload) {
    while (nbytes > 0) {
      size_t take = 0;
      if (payload_left_ > 0) {
        take = std::min(nbytes, payload_left_);
        payload_left_ -= take;
        payload(bytes, take);
      } else {
        take = std::min(nbytes, sizeof header_ - header_got_);
        std::memcpy(reinterpret_cast<std::byte*>(&header_) + header_got_, bytes, take);
        header_got_ += take;
        if (header_got_ == sizeof header_) {
          header_got_ = 0;
          payload_left_ = header_.payload_nbytes;
          frame(static_cast<const FrameHeader&>(header_));
        }
      }
      bytes += take;
      nbytes -= take;
    }
  }

 private:
  FrameHeader header_;
  size_t header_got_ = 0;
  size_t payload_left_ = 0;
};

} // namespace pycomm::sim
