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

namespace pycomm {
namespace {

// OpenSSL's numbers (openssl/ssl.h, openssl/bio.h).
constexpr int kErrorWantRead = 2;
constexpr int kErrorZeroReturn = 6;
constexpr int kKeyUpdateNotRequested =
    0; // an answer would have to travel against the stream, where perhaps nothing is ever written
constexpr int kBioRead = 1; // BIO_FLAGS_READ
constexpr int kBioRetry = 8; // BIO_FLAGS_SHOULD_RETRY
constexpr int kBioAll = 15;
constexpr int kBioEof = 2; // BIO_CTRL_EOF
constexpr int kBioFlush = 11; // BIO_CTRL_FLUSH

constexpr size_t kRecordNbytes = TlsBio::kRecordNbytes;
constexpr size_t kTlsTurnNbytes = 1 << 20;
constexpr const char* kReasonMark = "OpenSSL: ";
constexpr std::string_view kPlainFirst = "cy"; // FrameHeader::kMagic: a pycomm that speaks without TLS
constexpr const char* kPeerHasEnded = "look into the log of the rank at the other end: it has probably ended";

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

TlsLink& linkOf(Ssl* ssl) {
  return *static_cast<TlsLink*>(openSsl().SSL_get_ex_data(ssl, 0));
}

TlsBio& bioOf(Bio* bio) {
  return *static_cast<TlsBio*>(openSsl().BIO_get_data(bio));
}

/// Throws the exception that has ended an open connection. A lack of memory is an Error then, too: a second try would find no connection.
[[noreturn]] void throwFailure(const TlsBio& bio) {
  try {
    std::rethrow_exception(bio.failure());
  } catch (const std::bad_alloc&) {
    throw Error(noMemoryLeft("free memory on this host, or start fewer ranks on it"));
  }
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
  try {
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
  } catch (const std::bad_alloc&) { // kept: OpenSSL does nothing more with the connection, and gives no reason again
    if (bio_.failure() == nullptr) {
      bio_.fail();
    }
    throwFailure(bio_);
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
      throwFailure(bio_);
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

// ---- how it opens, and why it does not

bool TlsLink::finishConnect() {
  if (up()) {
    return true;
  }
  if (!under_->finishConnect()) {
    return false;
  }
  under_up_ = true;
  bio_.flush();
  ssl_.ERR_clear_error();
  const int done = ssl_.SSL_do_handshake(handle_);
  const int error = done == 1 ? 0 : ssl_.SSL_get_error(handle_, done);
  const bool waits = error == kErrorWantRead && bio_.failure() == nullptr && !bio_.underEnded();
  if (done != 1 && !waits) {
    const std::string why = takeReason();
    throwOwnTrouble(why);
    const Error failed = handshakeFailed(why);
    try {
      bio_.flush(); // the alert, so that the peer need not guess
    } catch (const Error&) {
    }
    throw failed;
  }
  ssl_.ERR_clear_error();
  refuseRepeated();
  bio_.flush();
  if (waits) {
    return false;
  }
  checkHandshake();
  peer_ = role_ == TlsContext::Role::Client ? identity_.server : identity_.client;
  bio_.finishHandshake();
  return true;
}

// A handshake that has succeeded need not have used the key: OpenSSL falls back to certificates.
void TlsLink::checkHandshake() const {
  const SslCipher* const cipher = ssl_.SSL_get_current_cipher(handle_);
  if (ssl_.SSL_session_reused(handle_) != 1 || ssl_.SSL_version(handle_) != kTlsVersion || cipher == nullptr ||
      ssl_.SSL_CIPHER_get_protocol_id(cipher) != kTlsCipher) {
    throw Error(
        ErrorCode::ProtocolViolation,
        "the TLS connection " + under_->describe() + " does not use the secret: it is not trusted",
        "start the job again; if it comes back, somebody between the hosts interferes, or another program has that port "
        "(ss -ltnp on its host)");
  }
}

// Nothing is sent: a client whose first message somebody else sent sooner sees only that the connection ends, and tries again.
void TlsLink::refuseRepeated() {
  if (role_ == TlsContext::Role::Client || !hasAnswered() || remembered_) {
    return;
  }
  ClientRandom random{};
  if (ssl_.SSL_get_client_random(handle_, random.data(), random.size()) != random.size()) {
    throw Error(ErrorCode::Internal, "OpenSSL does not have the random number of a client that it has answered");
  }
  remembered_ = true;
  if (!context_->seenHellos().add(random)) {
    throw Error(
        ErrorCode::ProtocolViolation,
        "the client on " + under_->describe() + " repeats the first message of another connection",
        "nothing: the connection was dropped, and a rank connects again; if it goes on, somebody between the hosts interferes");
  }
}

Error TlsLink::handshakeFailed(const std::string& why) const {
  ErrorRecord record;
  record.code = ErrorCode::ProtocolViolation;
  record.cause = why;
  record.summary = "the TLS handshake failed on " + under_->describe();
  if (bio_.failure() != nullptr) { // of the link below: all others have been thrown
    try {
      std::rethrow_exception(bio_.failure());
    } catch (const Error& error) {
      record.code = ErrorCode::ConnectionReset;
      record.summary += ": " + error.record().summary;
      record.cause = error.record().cause;
      record.hint = kPeerHasEnded;
    }
  } else if (bio_.first() == kPlainFirst) {
    record.code = ErrorCode::ConfigMismatch;
    record.summary += ": the peer has no secret, and this process has one (key id " + context_->secret().keyId() + ")";
    record.hint = std::string("give every rank the same secret file; ") + kHowToCopySecret;
  } else if (!refusal_.empty()) {
    record.code = ErrorCode::ConfigMismatch;
    record.summary += ": " + refusal_;
    record.hint = refusal_hint_;
  } else if (bio_.underEnded()) {
    record.code = ErrorCode::ConnectionReset;
    record.summary += ": the peer closed the connection";
    record.hint = kPeerHasEnded;
  } else if (role_ == TlsContext::Role::Client && why.find(" alert ") != std::string::npos) {
    record.code = ErrorCode::ConfigMismatch;
    record.summary += ": the rank with the secret of key id " + identity_.key_id +
        " does not listen there; something else does, or that rank has another secret";
    record.hint =
        "run \"python -m pycomm secret --id\" on both hosts; if they print the same, another process has taken the port: start the job again";
  } else {
    record.summary += ": the peer does not prove that it has the secret";
    record.hint =
        "if the job runs, ignore it; otherwise see which program has that port (ss -ltnp on its host), or which one between the hosts changes bytes";
  }
  return Error(record);
}

SslSession* TlsLink::sessionFor(std::string_view identity) {
  const auto theirs = PskIdentity::parse(identity);
  if (!theirs) {
    refusal_ = "the program that connected is not pycomm";
    refusal_hint_ = "if the job runs, ignore it; otherwise see who connects: ss -tnp";
  } else if (theirs->key_id != context_->secret().keyId()) {
    refusal_ =
        "the peer has a different secret (key id " + theirs->key_id + ", here " + context_->secret().keyId() + ")";
    refusal_hint_ = std::string("copy one secret file to every host; ") + kHowToCopySecret;
  } else if (theirs->server != context_->self()) {
    refusal_ = "the peer wanted another process than this one: an earlier run, or another job, used this port";
    refusal_hint_ = "start the job again; give each job its own port";
  } else if (theirs->client == context_->self()) {
    refusal_ = "this process connected to itself";
    refusal_hint_ = "start the job again";
  } else {
    identity_ = *theirs;
    return context_->newSession(handle_, identity_);
  }
  return nullptr;
}

// ---- what OpenSSL calls

// No exception may pass through OpenSSL's frames.

int useTlsSession(Ssl* ssl, const EvpMd*, const unsigned char** identity, size_t* nbytes, SslSession** session) {
  TlsLink& link = linkOf(ssl);
  try {
    *session = link.context_->newSession(ssl, link.identity_);
    *identity = reinterpret_cast<const unsigned char*>(link.identity_text_.data());
    *nbytes = link.identity_text_.size();
    return 1;
  } catch (...) {
    link.bio_.fail();
    return 0;
  }
}

int findTlsSession(Ssl* ssl, const unsigned char* identity, size_t nbytes, SslSession** session) {
  TlsLink& link = linkOf(ssl);
  try {
    *session = link.sessionFor({reinterpret_cast<const char*>(identity), nbytes});
    return 1; // without a session: the handshake goes on to certificates, of which there is none, and fails
  } catch (...) {
    link.bio_.fail();
    return 0;
  }
}

int writeTlsBio(Bio* bio, const char* bytes, int nbytes) {
  openSsl().BIO_clear_flags(bio, kBioAll);
  return nbytes <= 0 ? 0 : bioOf(bio).write(bytes, static_cast<size_t>(nbytes));
}

int readTlsBio(Bio* bio, char* into, int nbytes) {
  openSsl().BIO_clear_flags(bio, kBioAll);
  if (nbytes <= 0) {
    return 0;
  }
  bool retry = false;
  const int given = bioOf(bio).read(into, static_cast<size_t>(nbytes), retry);
  if (retry) {
    openSsl().BIO_set_flags(bio, kBioRead | kBioRetry);
  }
  return given;
}

long controlTlsBio(Bio* bio, int command, long, void*) {
  if (command == kBioEof) {
    return bioOf(bio).atEnd() ? 1 : 0;
  }
  return command == kBioFlush ? 1 : 0;
}

} // namespace pycomm
