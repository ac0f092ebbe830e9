#include "transport/secure/tls_link.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"
#include "base/fork_guard.h"
#include "transport/secure/tls_callbacks.h"

namespace pycomm {
namespace {

// OpenSSL's numbers (openssl/ssl.h).
constexpr int kErrorWantRead = 2;
constexpr int kErrorZeroReturn = 6;
constexpr int kKeyUpdateNotRequested =
    0; // an answer would have to travel against the stream, where perhaps nothing is ever written

constexpr size_t kRecordNbytes = TlsBio::kRecordNbytes;
constexpr size_t kTlsTurnNbytes = 1 << 20;
constexpr const char* kReasonMark = "OpenSSL: ";

enum class Changed { Nothing, Received, Sent };

// What an error of SSL_read() after the handshake says of bytes on their way. OpenSSL's numbers (openssl/err.h, openssl/sslerr.h): its
// reasons below 1000 judge what came, and those above are the peer's alerts, about what it got from here.
Changed whatWasChanged(unsigned long error) {
  constexpr unsigned long kLibSsl = 20;
  constexpr unsigned long kUnexpectedEof = 294;
  constexpr unsigned long kAlerts = 1000;
  // RFC 8446, 6.2: unexpected_message, bad_record_mac, record_overflow, illegal_parameter, decode_error, protocol_version.
  constexpr std::array<unsigned long, 6> kOfABadRecord = {10, 20, 22, 47, 50, 70};
  const unsigned long library = error >> 23U & 0xFFU;
  const unsigned long reason = error & 0x7FFFFFU; // above 0x80000: about this process, such as a lack of memory
  if (library != kLibSsl || reason == kUnexpectedEof) {
    return Changed::Nothing;
  }
  if (reason < kAlerts) {
    return Changed::Received;
  }
  const bool bad_record =
      std::find(kOfABadRecord.begin(), kOfABadRecord.end(), reason - kAlerts) != kOfABadRecord.end();
  return bad_record ? Changed::Sent : Changed::Nothing;
}

} // namespace

std::unique_ptr<TlsLink> TlsLink::connect(
    std::shared_ptr<const TlsContext> context,
    std::unique_ptr<Link> under,
    ProcessId server) {
  PskIdentity identity{context->secret().keyId(), context->self(), std::move(server)};
  return std::unique_ptr<TlsLink>(
      new TlsLink(std::move(context), std::move(under), TlsContext::Role::Client, std::move(identity)));
}

std::unique_ptr<TlsLink> TlsLink::accept(std::shared_ptr<const TlsContext> context, std::unique_ptr<Link> under) {
  return std::unique_ptr<TlsLink>(new TlsLink(std::move(context), std::move(under), TlsContext::Role::Server, {}));
}

TlsLink::TlsLink(
    std::shared_ptr<const TlsContext> context,
    std::unique_ptr<Link> under,
    TlsContext::Role role,
    PskIdentity identity)
    : context_(std::move(context)),
      ssl_(context_->ssl()),
      under_(std::move(under)),
      role_(role),
      forks_(forkCount()),
      identity_(std::move(identity)),
      identity_text_(identity_.text()),
      bio_(*under_) {
  handle_ = context_->newSsl(role);
  Bio* bio = nullptr;
  try {
    bio = context_->newBio();
  } catch (...) {
    ssl_.SSL_free(handle_);
    throw;
  }
  ssl_.BIO_set_data(bio, &bio_);
  ssl_.BIO_set_init(bio, 1);
  ssl_.SSL_set_bio(handle_, bio, bio); // which frees it
  if (ssl_.SSL_set_ex_data(handle_, 0, this) != 1) {
    ssl_.SSL_free(handle_);
    throw std::bad_alloc();
  }
}

TlsLink::~TlsLink() {
  if (forks_ == forkCount()) { // OpenSSL's locks may have been held when the parent forked
    ssl_.SSL_free(handle_);
  }
}

short TlsLink::roomEvent() const noexcept {
  if (!under_up_) {
    return under_->roomEvent();
  }
  return up() || unsent() ? POLLOUT : POLLIN;
}

bool TlsLink::buffered() const noexcept {
  if (bio_.failure() != nullptr) {
    return true; // kept for the next call to tryRead(), and the socket may never be readable again
  }
  if (!up()) {
    return false;
  }
  if (ended_) { // bytes behind the end of the peer's side, if there are any, belong to nobody
    return !end_reported_;
  }
  return ssl_.SSL_pending(handle_) > 0 || bio_.hasRecord();
}

std::string TlsLink::takeReason() const {
  const unsigned long error = ssl_.ERR_peek_error();
  const char* const text = error == 0 ? nullptr : ssl_.ERR_reason_error_string(error);
  std::string reason = text == nullptr ? "" : std::string(kReasonMark) + text;
  ssl_.ERR_clear_error();
  return reason;
}

void TlsLink::throwOwnTrouble(const std::string& why) const {
  if (why == std::string(kReasonMark) + "malloc failure") {
    throw std::bad_alloc();
  }
  if (bio_.failure() == nullptr) {
    return;
  }
  try {
    std::rethrow_exception(bio_.failure());
  } catch (const Error& error) {
    if (error.record().code != ErrorCode::ConnectionReset) {
      throw;
    }
  }
}

void TlsLink::throwBroken(const char* what) const {
  ErrorRecord record;
  record.cause = takeReason();
  throwOwnTrouble(record.cause);
  record.code = ErrorCode::ConnectionReset;
  record.summary = std::string(what) + " failed on " + describe();
  throw Error(record);
}

void TlsLink::throwUnreadable() const {
  const Changed changed = whatWasChanged(ssl_.ERR_peek_error());
  if (changed == Changed::Nothing) {
    throwBroken("reading");
  }
  ErrorRecord record;
  record.code = ErrorCode::DataCorrupt;
  record.peer = changed == Changed::Sent ? ErrorRecord::kThisEnd : -1;
  record.cause = takeReason();
  record.summary = "bytes were changed on their way over " + describe();
  throw Error(record);
}

void TlsLink::encrypt(ConstBufferView bytes) {
  ssl_.ERR_clear_error();
  if (records_ >= context_->options().records_per_key) {
    PYCOMM_FAULT_POINT("tls.key_update");
    if (ssl_.SSL_key_update(handle_, kKeyUpdateNotRequested) != 1) {
      throwBroken("changing the key");
    }
    records_ = 0;
  }
  if (ssl_.SSL_write(handle_, bytes.ptr, static_cast<int>(bytes.nbytes)) != static_cast<int>(bytes.nbytes)) {
    throwBroken("writing");
  }
  ++records_;
}

Progress TlsLink::tryWrite(const ConstBufferView* views, size_t count) {
  Progress progress;
  if (!up()) {
    progress.would_block = true;
    return progress;
  }
  bio_.flush();
  std::array<std::byte, kRecordNbytes> together; // NOLINT: filled below as far as it is used
  size_t view = 0;
  size_t offset = 0;
  const auto rest = [&] { return views[view].slice(offset, views[view].nbytes - offset); };
  const auto skipEmpty = [&] {
    while (view < count && offset == views[view].nbytes) {
      ++view;
      offset = 0;
    }
    return view < count;
  };
  const bool wanted = skipEmpty();
  while (progress.nbytes < kTlsTurnNbytes && skipEmpty()) {
    if (bio_.full()) {
      bio_.flush();
      if (bio_.full()) {
        break;
      }
    }
    ConstBufferView record = rest();
    if (record.nbytes >= kRecordNbytes || view + 1 == count) {
      record = record.slice(0, std::min(record.nbytes, kRecordNbytes));
      offset += record.nbytes;
    } else { // several small views share a record: a frame's header and its payload
      size_t filled = 0;
      while (filled < kRecordNbytes && skipEmpty()) {
        const ConstBufferView part = rest().slice(0, std::min(rest().nbytes, kRecordNbytes - filled));
        std::memcpy(together.data() + filled, part.ptr, part.nbytes);
        filled += part.nbytes;
        offset += part.nbytes;
      }
      record = {together.data(), filled};
    }
    encrypt(record);
    progress.nbytes += record.nbytes;
  }
  bio_.flush();
  progress.would_block = wanted && progress.nbytes == 0;
  return progress;
}

void TlsLink::answer() {
  try {
    bio_.flush();
  } catch (const Error&) {
    // The next write throws it; here there may still be something to read.
  }
}

Progress TlsLink::tryRead(BufferView into) {
  Progress progress;
  if (into.nbytes == 0 || !up()) {
    progress.would_block = into.nbytes != 0;
    return progress;
  }
  while (progress.nbytes < into.nbytes && !ended_) {
    if (bio_.failure() != nullptr) {
      if (progress.nbytes > 0) {
        break; // reported by the next call
      }
      std::rethrow_exception(bio_.failure());
    }
    constexpr size_t kMost = 1U << 30;
    const int wanted = static_cast<int>(std::min(into.nbytes - progress.nbytes, kMost));
    ssl_.ERR_clear_error(); // what another user of OpenSSL left on this thread would pass for an error of this call
    const int got = ssl_.SSL_read(handle_, into.ptr + progress.nbytes, wanted);
    if (got > 0) {
      progress.nbytes += static_cast<size_t>(got);
      continue;
    }
    const int error = ssl_.SSL_get_error(handle_, got);
    if (error == kErrorWantRead && bio_.failure() == nullptr) {
      break;
    }
    if (bio_.failure() != nullptr) {
      ssl_.ERR_clear_error();
      continue;
    }
    ended_ = error == kErrorZeroReturn || bio_.underEnded();
    if (!ended_) {
      try {
        throwUnreadable();
      } catch (...) {
        bio_.fail();
      }
      answer(); // an alert
      continue; // reports it now, or in the next call if something has been read
    }
    ssl_.ERR_clear_error();
  }
  answer();
  progress.closed = ended_ && progress.nbytes == 0;
  end_reported_ = end_reported_ || progress.closed;
  progress.would_block = progress.nbytes == 0 && !ended_;
  return progress;
}

void TlsLink::shutdownWrite() noexcept {
  try {
    if (up() && !bio_.endsWriting()) {
      ssl_.ERR_clear_error();
      (void)ssl_.SSL_shutdown(handle_); // writes a record into bio_
      ssl_.ERR_clear_error();
    }
    bio_.shutdownWrite();
  } catch (const std::exception&) {
    // the connection is gone already
  }
}

} // namespace pycomm
