#include "transport/secure/tls_bio.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace pycomm {
namespace {

constexpr size_t kRecordHeaderNbytes = 5;
constexpr size_t kFirstNbytes = 2;

} // namespace

TlsBio::TlsBio(Link& under) : under_(under), in_(kSmallInNbytes) {
  out_.reserve(kOutNbytes + kRecordRoomNbytes);
}

int TlsBio::write(const char* bytes, size_t nbytes) noexcept {
  if (outNbytes() + nbytes > kOutNbytes + kRecordRoomNbytes) {
    return -1; // only a peer that makes OpenSSL answer again and again while it reads nothing
  }
  if (out_.size() + nbytes > out_.capacity()) {
    out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(out_begin_));
    out_begin_ = 0;
  }
  const auto* const begin = reinterpret_cast<const std::byte*>(bytes);
  out_.insert(out_.end(), begin, begin + nbytes);
  has_written_ = true;
  return static_cast<int>(nbytes);
}

void TlsBio::flush() {
  if (unsent()) {
    const ConstBufferView rest(out_.data() + out_begin_, outNbytes());
    out_begin_ += under_.tryWrite(&rest, 1).nbytes;
    if (!unsent()) {
      out_.clear();
      out_begin_ = 0;
    }
  }
  if (writing_ == Writing::Ending && !unsent()) {
    writing_ = Writing::Ended;
    under_.shutdownWrite();
  }
}

void TlsBio::shutdownWrite() {
  if (writing_ == Writing::Open) {
    writing_ = Writing::Ending;
  }
  flush();
}

int TlsBio::read(char* into, size_t nbytes, bool& retry) noexcept {
  if (inNbytes() == 0 && !under_ended_ && failure_ == nullptr) {
    try {
      readAhead();
    } catch (...) {
      fail();
    }
  }
  const size_t given = std::min(nbytes, inNbytes());
  handshake_nbytes_ += handshake_done_ ? 0 : given;
  if (failure_ != nullptr || handshake_nbytes_ > kMaxHandshakeNbytes) {
    return -1;
  }
  std::memcpy(into, in_.data() + in_begin_, given);
  in_begin_ += given;
  retry = given == 0 && !under_ended_;
  return retry ? -1 : static_cast<int>(given);
}

void TlsBio::readAhead() {
  if (handshake_done_ && in_end_ == in_.size() && in_.size() < kInNbytes) {
    try {
      in_.resize(kInNbytes);
    } catch (const std::bad_alloc&) { // it only saves system calls
    }
  }
  in_begin_ = in_end_ = 0;
  const Progress progress = under_.tryRead({in_.data(), in_.size()});
  in_end_ = progress.nbytes;
  under_ended_ = progress.closed;
  if (first_.size() < kFirstNbytes) {
    first_.append(reinterpret_cast<const char*>(in_.data()), std::min(in_end_, kFirstNbytes - first_.size()));
  }
}

bool TlsBio::hasRecord() const noexcept {
  if (inNbytes() < kRecordHeaderNbytes) {
    return false;
  }
  const auto* const header = reinterpret_cast<const unsigned char*>(in_.data() + in_begin_);
  const size_t body = (size_t{header[3]} << 8) | header[4];
  return inNbytes() >= kRecordHeaderNbytes + body;
}

} // namespace pycomm
