// How a TlsLink opens, and why it does not.
#include <exception>
#include <utility>

#include "base/error.h"
#include "transport/secure/tls_link.h"

namespace pycomm {
namespace {

constexpr int kHandshakeWantsRead = 2; // SSL_ERROR_WANT_READ
constexpr std::string_view kPlainFirst = "cy"; // FrameHeader::kMagic: a pycomm that speaks without TLS

} // namespace

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
  const bool waits = error == kHandshakeWantsRead && bio_.failure() == nullptr && !bio_.underEnded();
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
        "the TLS connection " + under_->describe() + " does not use the secret: it is not trusted");
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
        "the client on " + under_->describe() + " repeats the first message of another connection");
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
    }
  } else if (bio_.first() == kPlainFirst) {
    record.code = ErrorCode::ConfigMismatch;
    record.summary += ": the peer has no secret, and this process has one (key id " + context_->secret().keyId() + ")";
    record.hint = "give every rank the same secret file";
  } else if (!refusal_.empty()) {
    record.code = ErrorCode::ConfigMismatch;
    record.summary += ": " + refusal_;
    record.hint = "give every rank the same secret file, and each job its own port";
  } else if (bio_.underEnded()) {
    record.code = ErrorCode::ConnectionReset;
    record.summary += ": the peer closed the connection";
  } else if (role_ == TlsContext::Role::Client && why.find(" alert ") != std::string::npos) {
    record.code = ErrorCode::ConfigMismatch;
    record.summary +=
        ": process " + identity_.server + " with the secret of key id " + identity_.key_id + " does not listen there";
    record.hint =
        "run \"python -m pycomm secret --id\" on both hosts; if they print the same, another process has taken the port: start the job again";
  } else {
    record.summary += ": the peer does not prove that it has the secret";
    record.hint = "see which program listens there, or stands between the hosts (python -m pycomm doctor)";
  }
  return Error(record);
}

SslSession* TlsLink::sessionFor(std::string_view identity) {
  const auto theirs = PskIdentity::parse(identity);
  if (!theirs) {
    refusal_ = "it came from no process of pycomm";
  } else if (theirs->key_id != context_->secret().keyId()) {
    refusal_ =
        "the peer has a different secret (key id " + theirs->key_id + ", here " + context_->secret().keyId() + ")";
  } else if (theirs->server != context_->self()) {
    refusal_ = "the peer looks for process " + theirs->server + ", and this is " + context_->self();
  } else if (theirs->client == context_->self()) {
    refusal_ = "this process connected to itself";
  } else {
    identity_ = *theirs;
    return context_->newSession(handle_, identity_);
  }
  return nullptr;
}

} // namespace pycomm
