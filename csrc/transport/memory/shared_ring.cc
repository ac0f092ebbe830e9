#include "transport/memory/shared_ring.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/fault_point.h"

namespace pycomm {
namespace {

// A waiting writer resumes when one part of this many of the ring is free.
constexpr size_t kResumeShare = 4;
// A reader returns room after at most this many bytes, so that both ends copy at the same time.
constexpr size_t kTakeNbytes = 128 << 10;

// The ring knows no ranks: the caller completes the record with the peer and the summary.
[[noreturn]] void throwImpossible(const char* which) {
  ErrorRecord record;
  record.code = ErrorCode::ProtocolViolation;
  record.cause = std::string("its counter of bytes ") + which + " cannot be";
  record.hint = "look for native code that writes out of bounds in that process, or set PYCOMM_TRANSPORT=tcp";
  throw Error(record);
}

// The counter as published to the other end. Tests break it, or end the process here, between the copy and its
// publication.
uint64_t shown(const Fault& fault, uint64_t counter) noexcept {
  if (fault.flip) {
    flipBit(&counter, sizeof counter);
  }
  return counter;
}

} // namespace

RingWriter::RingWriter(RingMemory memory) noexcept : memory_(memory) {
  memory_.words().writer_awake.store(1, std::memory_order_seq_cst);
}

size_t RingWriter::put(ConstBufferView bytes) {
  if (memory_.nbytes - static_cast<size_t>(written_ - taken_) < bytes.nbytes) {
    const uint64_t taken = memory_.words().taken.load(std::memory_order_seq_cst);
    if (taken < taken_ || taken > published_) {
      throwImpossible("taken");
    }
    taken_ = taken;
  }
  const size_t room = memory_.nbytes - static_cast<size_t>(written_ - taken_);
  const size_t nbytes = std::min(room, bytes.nbytes);
  const size_t place = static_cast<size_t>(written_) & (memory_.nbytes - 1);
  const size_t first = std::min(nbytes, memory_.nbytes - place);
  if (first > 0) {
    std::memcpy(memory_.bytes() + place, bytes.ptr, first);
  }
  if (nbytes > first) {
    std::memcpy(memory_.bytes(), bytes.ptr + first, nbytes - first);
  }
  written_ += nbytes;
  return nbytes;
}

bool RingWriter::publish() {
  RingWords& words = memory_.words();
  published_ = written_;
  words.written.store(shown(PYCOMM_FAULT("ring.written"), written_), std::memory_order_seq_cst);
  return words.reader_awake.load(std::memory_order_seq_cst) == 0 &&
      words.reader_awake.exchange(1, std::memory_order_seq_cst) == 0;
}

bool RingWriter::hasRoom() const noexcept {
  const uint64_t used = written_ - memory_.words().taken.load(std::memory_order_seq_cst);
  // An impossible counter counts as room: put() then reports it.
  return used > memory_.nbytes || memory_.nbytes - static_cast<size_t>(used) >= memory_.nbytes / kResumeShare;
}

bool RingWriter::sleep() noexcept {
  // Stored even if it was 0 before: the reader may have woken this end since, for room that is gone again.
  memory_.words().writer_awake.store(0, std::memory_order_seq_cst);
  asleep_ = true;
  return !hasRoom();
}

bool RingWriter::wake() noexcept {
  if (!asleep_) {
    return false;
  }
  asleep_ = false;
  return memory_.words().writer_awake.exchange(1, std::memory_order_seq_cst) != 0;
}

size_t RingReader::take(BufferView into) {
  if (written_ == taken_ || static_cast<size_t>(written_ - taken_) < into.nbytes) {
    const uint64_t written = memory_.words().written.load(std::memory_order_seq_cst);
    if (written < written_ || written - taken_ > memory_.nbytes) {
      throwImpossible("written");
    }
    written_ = written;
  }
  const size_t nbytes = std::min({static_cast<size_t>(written_ - taken_), into.nbytes, kTakeNbytes});
  const size_t place = static_cast<size_t>(taken_) & (memory_.nbytes - 1);
  const size_t first = std::min(nbytes, memory_.nbytes - place);
  if (first > 0) {
    std::memcpy(into.ptr, memory_.bytes() + place, first);
  }
  if (nbytes > first) {
    std::memcpy(into.ptr + first, memory_.bytes(), nbytes - first);
  }
  taken_ += nbytes;
  return nbytes;
}

bool RingReader::publish() {
  RingWords& words = memory_.words();
  words.taken.store(shown(PYCOMM_FAULT("ring.taken"), taken_), std::memory_order_seq_cst);
  if (words.writer_awake.load(std::memory_order_seq_cst) != 0) {
    return false;
  }
  const uint64_t used = words.written.load(std::memory_order_seq_cst) - taken_;
  return (used > memory_.nbytes || memory_.nbytes - static_cast<size_t>(used) >= memory_.nbytes / kResumeShare) &&
      words.writer_awake.exchange(1, std::memory_order_seq_cst) == 0;
}

bool RingReader::hasBytes() const noexcept {
  return memory_.words().written.load(std::memory_order_seq_cst) != taken_;
}

bool RingReader::sleep() noexcept {
  memory_.words().reader_awake.store(0, std::memory_order_seq_cst);
  asleep_ = true;
  return !hasBytes();
}

bool RingReader::wake() noexcept {
  if (!asleep_) {
    return false;
  }
  asleep_ = false;
  return memory_.words().reader_awake.exchange(1, std::memory_order_seq_cst) != 0;
}

} // namespace pycomm
