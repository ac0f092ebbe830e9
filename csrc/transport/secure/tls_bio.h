#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "transport/link.h"

namespace pycomm {

/// The encrypted bytes of one TLS connection, between OpenSSL and the link below. OpenSSL never sees the socket: its BIO
/// (tls_link.h) calls write(), read() and atEnd(). The TlsLink that calls OpenSSL uses the rest.
///
///   OpenSSL -> write() -> unsent bytes -> flush() -> link below
///   OpenSSL <- read()  <- bytes read ahead        <- link below
///
/// write() and read() never wait. They throw nothing, because no exception may pass through OpenSSL's frames: they keep it as
/// failure(), and the caller of OpenSSL throws it.
///
/// One thread at a time, for reading and writing together.
class TlsBio {
 public:
  static constexpr size_t kRecordNbytes = 16 << 10; ///< most plain text of one record
  static constexpr size_t kOutNbytes = 64 << 10; ///< no further record is made while so many bytes wait
  static constexpr size_t kRecordRoomNbytes =
      kRecordNbytes + 512; ///< a record with its header and tag, a key update before it, an alert after it
  static constexpr size_t kSmallInNbytes = 4 << 10; ///< enough for handshakes and control frames
  static constexpr size_t kInNbytes = 64 << 10; ///< from the first read that fills the small buffer
  static constexpr size_t kMaxHandshakeNbytes = 4 << 10; ///< read from the peer; about 400 are usual

  /// `under` outlives this.
  explicit TlsBio(Link& under);
  TlsBio(const TlsBio&) = delete;
  TlsBio& operator=(const TlsBio&) = delete;

  /// Takes all of `bytes`, or returns -1: more than kOutNbytes + kRecordRoomNbytes would be unsent. Needs no memory.
  [[nodiscard]] int write(const char* bytes, size_t nbytes) noexcept;
  /// Reads from the link below if nothing is read ahead. Returns the number of bytes; 0 at the peer's end; -1 with `retry` if nothing
  /// has arrived; -1 without it after a failure(), or if the peer's handshake is too long.
  [[nodiscard]] int read(char* into, size_t nbytes, bool& retry) noexcept;
  /// A read() has found the peer's end, and nothing is left before it.
  [[nodiscard]] bool atEnd() const noexcept {
    return under_ended_ && inNbytes() == 0;
  }

  /// Sends unsent bytes; throws what the link below throws.
  void flush();
  [[nodiscard]] bool unsent() const noexcept {
    return outNbytes() > 0;
  }
  /// No room for another record.
  [[nodiscard]] bool full() const noexcept {
    return outNbytes() >= kOutNbytes;
  }
  /// OpenSSL has written something.
  [[nodiscard]] bool hasWritten() const noexcept {
    return has_written_;
  }
  /// Ends the write side of the link below once nothing is unsent(): now, or in a later flush(). Throws what flush() throws.
  void shutdownWrite();
  /// shutdownWrite() was called.
  [[nodiscard]] bool endsWriting() const noexcept {
    return writing_ != Writing::Open;
  }

  /// From now on read() takes any number of bytes, and reads further ahead.
  void finishHandshake() noexcept {
    handshake_done_ = true;
  }
  [[nodiscard]] bool handshakeDone() const noexcept {
    return handshake_done_;
  }
  /// The first two bytes of the peer, or fewer if no more have come.
  [[nodiscard]] std::string_view first() const noexcept {
    return first_;
  }
  /// A whole record is read ahead. The next bytes must be a header: OpenSSL stops between two records if it has not been asked for more.
  [[nodiscard]] bool hasRecord() const noexcept;
  /// The link below has nothing more to read.
  [[nodiscard]] bool underEnded() const noexcept {
    return under_ended_;
  }

  /// The exception of the link below, or another that could not be thrown; null if there is none. read() fails after it.
  [[nodiscard]] const std::exception_ptr& failure() const noexcept {
    return failure_;
  }
  /// Keeps the exception that is being handled as failure().
  void fail() noexcept {
    failure_ = std::current_exception();
  }

 private:
  enum class Writing {
    Open,
    Ending, ///< shutdownWrite() was called
    Ended ///< and has reached the link below
  };

  [[nodiscard]] size_t outNbytes() const noexcept {
    return out_.size() - out_begin_;
  }
  [[nodiscard]] size_t inNbytes() const noexcept {
    return in_end_ - in_begin_;
  }
  void readAhead();

  Link& under_; ///< the TlsLink's own

  /// From out_begin_ on: OpenSSL has written them, and the kernel has not taken them. Has all the memory that it may need, as OpenSSL does nothing
  /// more with a connection whose write() has failed.
  std::vector<std::byte> out_;
  size_t out_begin_ = 0;
  Writing writing_ = Writing::Open;
  bool has_written_ = false;

  std::vector<std::byte> in_; ///< from in_begin_ to in_end_: the kernel has given them, and OpenSSL has not read them
  size_t in_begin_ = 0;
  size_t in_end_ = 0;
  size_t handshake_nbytes_ = 0; ///< OpenSSL has read them before the handshake was done
  std::string first_;
  bool handshake_done_ = false;
  bool under_ended_ = false;
  std::exception_ptr failure_;
};

} // namespace pycomm
