#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "base/buffer_view.h"
#include "base/error.h"
#include "engine/loop/staging_pool.h"
#include "transport/frame_header.h"
#include "transport/link.h"

namespace pycomm {

/// A frame on its way out. The payload is borrowed from the operation's memory, or owned in `staging`.
struct OutFrame {
  FrameHeader header;
  ConstBufferView payload;
  StagingBuffer staging;
  int64_t step = -1; ///< to be reported as sent; -1: nobody waits for it
};

/// Where the payload of an arriving frame goes.
struct Sink {
  BufferView into; ///< of the payload's size, or empty to drop it
  StagingBuffer staging; ///< owns `into` unless that is the operation's own memory
  bool unexpected = false; ///< the operation was not posted here when the header arrived
};

/// Queues frames for one peer and writes them as the link takes them, many in one system call.
/// One thread. A link that breaks throws Error(ConnectionReset) out of flush().
class OutChannel {
 public:
  explicit OutChannel(Link& link) : link_(link) {}

  void push(OutFrame&& frame) {
    frames_.push_back(std::move(frame));
  }
  [[nodiscard]] bool empty() const noexcept {
    return frames_.empty();
  }
  [[nodiscard]] size_t size() const noexcept {
    return frames_.size();
  }
  /// Writes up to a bounded number of bytes, so that reading gets its turn. Appends the frames that the kernel has taken whole
  /// to `sent`. Returns true while frames are left, or bytes of them that the link has taken and not sent.
  [[nodiscard]] bool flush(std::vector<OutFrame>& sent);
  /// Forgets these frames, but for one that the kernel has a part of.
  template <typename Unwanted>
  void drop(const Unwanted& unwanted) noexcept {
    const auto first = frames_.begin() + (written_ > 0 ? 1 : 0);
    frames_.erase(
        std::remove_if(first, frames_.end(), [&](const OutFrame& frame) { return unwanted(frame.header); }),
        frames_.end());
  }
  /// Forgets every frame, so that no memory which a frame borrows is read again. A frame without a payload stays if the kernel has a part
  /// of it: then a goodbye can follow.
  void stopTouchingMemory() noexcept {
    cut_short_ = cut_short_ || (written_ > 0 && frames_.front().payload.nbytes > 0);
    if (cut_short_) {
      frames_.clear();
      written_ = 0;
    }
    while (frames_.size() > (written_ > 0 ? 1U : 0U)) {
      frames_.pop_back();
    }
  }
  /// The peer has a part of a frame whose rest was forgotten: it would take anything that followed for that rest.
  [[nodiscard]] bool cutShort() const noexcept {
    return cut_short_;
  }

 private:
  Link& link_; ///< the owner's, which holds this channel beside it
  std::deque<OutFrame> frames_;
  size_t written_ = 0; ///< bytes of the first frame (header and payload) that are gone
  bool cut_short_ = false;
};

/// Cuts what arrives from one peer into frames. One thread.
class InChannel {
 public:
  /// Receives frames. If a function throws, so does read(), and the next read() goes on: with the same header, or behind the frame.
  class Receiver {
   public:
    virtual ~Receiver() = default;
    /// A header has arrived; says where its payload goes. Called once per frame, unless it throws.
    [[nodiscard]] virtual Sink onHeader(int peer, const FrameHeader& header) = 0;
    /// The payload is complete (also when there is none).
    virtual void onFrame(int peer, const FrameHeader& header, Sink sink) = 0;
  };

  InChannel(int peer, Link& link, Receiver& receiver, size_t buffer_nbytes = 64 << 10)
      : peer_(peer), link_(link), receiver_(receiver), buffer_(buffer_nbytes) {}

  /// Reads a bounded number of bytes. False once the peer has closed its side. Throws Error(ConnectionReset),
  /// Error(DataCorrupt) or Error(ProtocolViolation).
  [[nodiscard]] bool read();
  /// Writes no more bytes of the frame that is arriving to the place that the receiver named. The rest of its payload is read and
  /// dropped, so that the frames after it can be read.
  void stopTouchingMemory() noexcept {
    sink_ = Sink{};
  }
  /// The last read() brought something.
  [[nodiscard]] bool moved() const noexcept {
    return turn_ > 0;
  }

 private:
  void consumeBuffer();
  void startFrame();
  void finishFrame();

  const int peer_;
  Link& link_; ///< the owner's, as is the receiver
  Receiver& receiver_;
  std::vector<std::byte> buffer_; ///< headers and small payloads arrive here, several with one system call
  size_t begin_ = 0;
  size_t end_ = 0;
  FrameHeader header_;
  bool in_payload_ = false;
  size_t payload_got_ = 0;
  size_t turn_ = 0; ///< bytes that the last read() brought
  Sink sink_;
};

} // namespace pycomm
