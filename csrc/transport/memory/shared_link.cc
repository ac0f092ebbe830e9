#include "transport/memory/shared_link.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"

namespace pycomm {
namespace {

// A long write is published in parts of this size, so that both ends copy at the same time.
constexpr size_t kPublishNbytes = 128 << 10;
constexpr int kMaxBellTurns = 1024; // of 64 bytes each: more than a socket holds

} // namespace

SharedLink::SharedLink(std::unique_ptr<Link> doorbell, Rings rings, State state)
    : doorbell_(std::move(doorbell)), arena_(std::move(rings.arena)), connected_(state == State::Connected) {
  if (rings.out) {
    writer_.emplace(*rings.out);
  }
  if (rings.in) {
    reader_.emplace(*rings.in);
  }
}

SharedLink::~SharedLink() {
  doorbell_.reset(); // first: an end that rings from now on finds it closed
  if (reader_) {
    reader_->leave();
  }
}

void SharedLink::ringBell(bool asleep) {
  if (asleep) {
    constexpr std::byte kBell{1};
    const ConstBufferView one(&kBell, 1);
    static_cast<void>(doorbell_->tryWrite(&one, 1)); // no room: enough wake-ups are queued already
  }
}

bool SharedLink::hearBell() noexcept {
  if (ended_ || broken_ != nullptr) {
    return true;
  }
  std::array<std::byte, 64> bells; // NOLINT: only written
  try {
    ended_ = doorbell_->tryRead({bells.data(), bells.size()}).closed;
  } catch (const Error& error) {
    // The peer closed before it read its last wake-up: that loses no data.
    ended_ = error.record().cause.rfind("ECONNRESET", 0) == 0;
    broken_ = ended_ ? nullptr : std::current_exception();
  } catch (...) {
    broken_ = std::current_exception();
  }
  return ended_ || broken_ != nullptr;
}

void SharedLink::refuseWrite() const {
  // If the link has both directions, the peer may have ended only its own side.
  if (broken_ != nullptr || (ended_ && !reader_)) {
    throw Error(systemError(ErrorCode::ConnectionReset, "writing failed on " + describe(), EPIPE));
  }
}

Progress SharedLink::tryWrite(const ConstBufferView* views, size_t count) {
  const Fault fault = PYCOMM_FAULT("shared.write");
  if (fault.error_number != 0) {
    throw Error(systemError(ErrorCode::ConnectionReset, "writing failed on " + describe(), fault.error_number));
  }
  refuseWrite();
  Progress progress;
  for (;;) {
    bool full = false;
    for (size_t i = 0; i < count && !full; ++i) {
      for (size_t done = 0; done < views[i].nbytes && !full;) {
        size_t part = std::min(views[i].nbytes - done, kPublishNbytes);
        part = fault.shorten ? 1 : part;
        const size_t put = writer_->put(views[i].slice(done, part));
        done += put;
        progress.nbytes += put;
        full = put < part || fault.shorten;
        if (writer_->unpublished() >= kPublishNbytes) {
          ringBell(writer_->publish());
        }
      }
    }
    if (writer_->unpublished() > 0) {
      if (writer_->wake()) {
        hearBell();
      }
      ringBell(writer_->publish());
    }
    if (progress.nbytes > 0 || !full) {
      return progress;
    }
    hearBell();
    refuseWrite();
    ringBell(ended_); // to find out whether it is gone
    if (writer_->sleep()) {
      progress.would_block = true;
      return progress;
    }
  }
}

Progress SharedLink::tryRead(BufferView into) {
  Progress progress;
  if (into.nbytes == 0) {
    return progress;
  }
  const Fault fault = PYCOMM_FAULT("shared.read");
  if (fault.error_number != 0) {
    throw Error(systemError(ErrorCode::ConnectionReset, "reading failed on " + describe(), fault.error_number));
  }
  const size_t wanted = fault.shorten ? 1 : into.nbytes;
  for (bool asked = false;;) {
    while (reader_ && progress.nbytes < wanted) {
      const size_t taken = reader_->take(into.slice(progress.nbytes, wanted - progress.nbytes));
      if (taken == 0) {
        break;
      }
      progress.nbytes += taken;
      if (reader_->publish()) {
        try {
          ringBell(true);
        } catch (const Error&) { // its end is read in its turn
        }
      }
    }
    if (progress.nbytes > 0) {
      if (reader_->wake()) {
        hearBell();
      }
      if (fault.flip) {
        flipBit(into.ptr, progress.nbytes);
      }
      return progress;
    }
    // All bytes written before the end are in the ring when the end is seen.
    if (!std::exchange(asked, true)) {
      hearBell();
      continue;
    }
    if (broken_ != nullptr) {
      std::rethrow_exception(broken_);
    }
    progress.closed = ended_;
    if (ended_ || !reader_ || reader_->sleep()) {
      progress.would_block = !ended_;
      return progress;
    }
  }
}

bool SharedLink::isReset() noexcept {
  for (int turn = 0; turn < kMaxBellTurns; ++turn) { // the peer may have rung before it closed
    if (hearBell()) {
      return !ended_;
    }
  }
  return true;
}

void SharedLink::shutdownWrite() noexcept {
  doorbell_->shutdownWrite();
}

bool SharedLink::finishConnect() {
  connected_ = connected_ || doorbell_->finishConnect();
  return connected_;
}

std::string SharedLink::describe() const {
  return doorbell_->describe() + ", through shared memory";
}

} // namespace pycomm
