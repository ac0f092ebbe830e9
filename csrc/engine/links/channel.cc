#include "engine/links/channel.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/fault_point.h"

namespace pycomm {
namespace {

// One turn of one link. Large enough to amortise the event loop, small enough that writing and reading alternate.
constexpr size_t kTurnNbytes = 1 << 20;
constexpr size_t kMaxViews = 32;
// From here on a payload is read straight to its place; below, one read into the buffer brings several frames.
constexpr size_t kDirectNbytes = 16 << 10;

} // namespace

bool OutChannel::flush(std::vector<OutFrame>& sent) {
  if (frames_.empty() && link_.unsent()) {
    static_cast<void>(link_.tryWrite(nullptr, 0));
  }
  size_t turn = 0;
  while (!frames_.empty() && turn < kTurnNbytes) {
    std::array<ConstBufferView, kMaxViews> views{};
    size_t count = 0;
    size_t skip = written_;
    size_t offered = 0;
    if (sent.capacity() - sent.size() < kMaxViews) { // now: once the kernel has a frame, that must not be forgotten
      sent.reserve(2 * sent.capacity() + kMaxViews);
    }
    for (size_t i = 0; i < frames_.size() && count + 2 <= kMaxViews && offered < kTurnNbytes; ++i) {
      const OutFrame& frame = frames_[i];
      const ConstBufferView header(reinterpret_cast<const std::byte*>(&frame.header), sizeof frame.header);
      for (const ConstBufferView& part : {header, frame.payload}) {
        const size_t gone = std::min(skip, part.nbytes);
        skip -= gone;
        if (part.nbytes > gone) {
          views[count++] = part.slice(gone, part.nbytes - gone);
          offered += part.nbytes - gone;
        }
      }
    }
    const Progress progress = link_.tryWrite(views.data(), count);
    turn += progress.nbytes;
    written_ += progress.nbytes;
    while (!frames_.empty() && written_ >= sizeof(FrameHeader) + frames_.front().payload.nbytes) {
      written_ -= sizeof(FrameHeader) + frames_.front().payload.nbytes;
      sent.push_back(std::move(frames_.front()));
      frames_.pop_front();
    }
    if (progress.would_block || progress.nbytes == 0 || (!frames_.empty() && link_.knownFull())) {
      break;
    }
  }
  return !frames_.empty() || link_.unsent();
}

void InChannel::startFrame() {
  std::memcpy(&header_, buffer_.data() + begin_, sizeof header_);
  if (PYCOMM_FAULT("frame.arriving").flip) {
    flipBit(&header_.magic, sizeof header_.magic);
  }
  if (header_.magic != FrameHeader::kMagic || header_.version != FrameHeader::kVersion ||
      header_.payload_nbytes > kMaxPayloadNbytes) {
    throw Error(ErrorCode::ProtocolViolation, "bytes that are no frame arrived from the peer");
  }
  sink_ = receiver_.onHeader(peer_, header_);
  begin_ += sizeof header_; // only now: a header for which there was no memory is read again
  in_payload_ = true;
  payload_got_ = 0;
}

void InChannel::finishFrame() {
  in_payload_ = false;
  receiver_.onFrame(peer_, header_, std::exchange(sink_, Sink{}));
}

void InChannel::consumeBuffer() {
  for (;;) {
    if (!in_payload_) {
      if (end_ - begin_ < sizeof(FrameHeader)) {
        break;
      }
      startFrame();
    }
    const size_t take = std::min(end_ - begin_, size_t{header_.payload_nbytes} - payload_got_);
    if (take > 0 && sink_.into.nbytes > 0) {
      std::memcpy(sink_.into.ptr + payload_got_, buffer_.data() + begin_, take);
    }
    begin_ += take;
    payload_got_ += take;
    if (payload_got_ < header_.payload_nbytes) {
      PYCOMM_FAULT_POINT("payload.partly");
      break;
    }
    finishFrame();
  }
  // At most a part of a header is left: move it to the front.
  std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
}

bool InChannel::read() {
  turn_ = 0;
  // The receiver has thrown. This comes before anything that the link brings now, such as its end.
  if (end_ >= sizeof(FrameHeader)) {
    consumeBuffer();
  }
  while (turn_ < kTurnNbytes && (turn_ == 0 || !link_.knownEmpty())) {
    const size_t missing = in_payload_ ? size_t{header_.payload_nbytes} - payload_got_ : 0;
    const bool cheap = link_.readsAreCheap();
    if (missing > 0 && (cheap || missing >= kDirectNbytes) && sink_.into.nbytes > 0) { // the buffer is empty here
      const Progress progress = link_.tryRead(sink_.into.slice(payload_got_, missing));
      turn_ += progress.nbytes;
      payload_got_ += progress.nbytes;
      if (progress.nbytes == missing) {
        finishFrame();
      } else if (progress.nbytes > 0) {
        PYCOMM_FAULT_POINT("payload.partly");
      }
      if (progress.closed || progress.would_block) {
        return !progress.closed;
      }
      continue;
    }
    // A payload that is in nobody's way is then copied once, straight to its place.
    const size_t header_left = in_payload_ ? buffer_.size() : sizeof(FrameHeader) - end_;
    const size_t room = cheap ? std::min(header_left, buffer_.size() - end_) : buffer_.size() - end_;
    const Progress progress = link_.tryRead({buffer_.data() + end_, room});
    turn_ += progress.nbytes;
    end_ += progress.nbytes;
    consumeBuffer();
    if (progress.closed || progress.would_block) {
      return !progress.closed;
    }
    if (progress.nbytes < room) {
      return true; // most likely drained; epoll says so if not
    }
  }
  return true;
}

} // namespace pycomm
