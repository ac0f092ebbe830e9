// How a TlsLink opens, and why it does not.
#include <exception>
#include <utility>

#include "base/error.h"
#include "transport/secure/tls_link.h"

namespace pycomm {
namespace {

constexpr int kHandshakeWantsRead = 2; // SSL_ERROR_WANT_READ
constexpr std::string_view kPlainFirst = "cy"; // FrameHeader::kMagic: a pycomm that speaks without TLS
constexpr const char* kPeerHasEnded = "look into the log of the rank at the other end: it has probably ended";

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

} // namespace pycomm
