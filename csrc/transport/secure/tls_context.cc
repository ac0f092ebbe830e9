#include "transport/secure/tls_context.h"

#include <array>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/fork_guard.h"
#include "transport/random_bytes.h"
#include "transport/secure/tls_link.h"

namespace pycomm {
namespace {

// OpenSSL's numbers (openssl/ssl.h), which are part of its ABI.
constexpr int kCtrlSessionCache = 44;
constexpr int kCtrlGroupsList = 92;
constexpr int kCtrlMinVersion = 123;
constexpr int kCtrlMaxVersion = 124;
constexpr uint64_t kOptionKtls = 1U << 3;
constexpr uint64_t kOptionIgnoreEof = 1U << 7;
constexpr uint64_t kOptionAllowNoDhe = 1U << 10;
constexpr uint64_t kOptionNoTicket = 1U << 14;
constexpr uint64_t kOptionMiddleboxCompat = 1U << 20;
constexpr uint64_t kOptionPreferNoDhe = uint64_t{1} << 35;
constexpr int kVerifyNone = 0;
constexpr int kVerifyPeer = 1;
constexpr int kBioTypeSourceSink = 0x0400;

constexpr size_t kProcessIdChars = 32;
constexpr size_t kTlsKeyIdChars = 8;
constexpr long kSessionTimeoutS = 1L << 30; // it is used at once
constexpr std::string_view kIdentityMark = "pc1.";
constexpr std::string_view kLinkMark = ".l.";

bool isHex(std::string_view text, size_t length) {
  return text.size() == length && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

void demand(bool good, const char* what) {
  if (!good) {
    throw Error(
        ErrorCode::Unsupported,
        std::string("OpenSSL refused ") + what + ", which the connections of a job with a secret need",
        "allow TLS 1.3, P-256 and AES-128-GCM in this host's OpenSSL settings (/etc/ssl/openssl.cnf; on Fedora and RHEL "
        "sudo update-crypto-policies --set DEFAULT), or run without a secret: PYCOMM_SECRET_FILE=none and no PYCOMM_SECURITY=require, on every host");
  }
}

} // namespace

ProcessId newProcessId() {
  std::array<char, kProcessIdChars / 2> bytes{};
  fillRandom(bytes.data(), bytes.size());
  return hexOf({bytes.data(), bytes.size()});
}

bool isProcessId(std::string_view text) {
  return isHex(text, kProcessIdChars);
}

std::string PskIdentity::text() const {
  return std::string(kIdentityMark) + key_id + std::string(kLinkMark) + client + "." + server;
}

std::optional<PskIdentity> PskIdentity::parse(std::string_view text) {
  constexpr size_t kClientAt = kIdentityMark.size() + kTlsKeyIdChars + kLinkMark.size();
  if (text.size() != kClientAt + 2 * kProcessIdChars + 1) {
    return std::nullopt;
  }
  PskIdentity identity;
  identity.key_id = text.substr(kIdentityMark.size(), kTlsKeyIdChars);
  identity.client = text.substr(kClientAt, kProcessIdChars);
  identity.server = text.substr(kClientAt + kProcessIdChars + 1);
  const bool good = isHex(identity.key_id, kTlsKeyIdChars) && isHex(identity.client, kProcessIdChars) &&
      isHex(identity.server, kProcessIdChars) && identity.text() == text;
  return good ? std::optional<PskIdentity>(std::move(identity)) : std::nullopt;
}

TlsContext::TlsContext(
    std::shared_ptr<const Secret> secret,
    ProcessId self,
    const TlsOptions& options,
    const OpenSsl& ssl)
    : ssl_(ssl), secret_(std::move(secret)), self_(std::move(self)), options_(options), forks_(forkCount()) {
  static const int type = ssl_.BIO_get_new_index(); // OpenSSL has some hundred for the whole process
  bio_method_ = ssl_.BIO_meth_new(type | kBioTypeSourceSink, "pycomm link");
  if (bio_method_ == nullptr) {
    throw std::bad_alloc();
  }
  ssl_.BIO_meth_set_write(bio_method_, writeTlsBio);
  ssl_.BIO_meth_set_read(bio_method_, readTlsBio);
  ssl_.BIO_meth_set_ctrl(bio_method_, controlTlsBio);
  try {
    client_ = newContext(Role::Client);
    server_ = newContext(Role::Server);
  } catch (...) {
    ssl_.SSL_CTX_free(client_); // takes null
    ssl_.BIO_meth_free(bio_method_);
    throw;
  }
}

TlsContext::~TlsContext() {
  if (forks_ != forkCount()) { // OpenSSL's locks may have been held when the parent forked
    return;
  }
  ssl_.SSL_CTX_free(client_);
  ssl_.SSL_CTX_free(server_);
  ssl_.BIO_meth_free(bio_method_);
}

SslContext* TlsContext::newContext(Role role) const {
  ssl_.ERR_clear_error();
  SslContext* const context = ssl_.SSL_CTX_new(ssl_.TLS_method());
  if (context == nullptr) {
    throw std::bad_alloc();
  }
  try {
    // All of it is set here, because the system's openssl.cnf may have set something else.
    demand(
        ssl_.SSL_CTX_ctrl(context, kCtrlMinVersion, kTlsVersion, nullptr) == 1 &&
            ssl_.SSL_CTX_ctrl(context, kCtrlMaxVersion, kTlsVersion, nullptr) == 1,
        "TLS 1.3");
    // One cipher: OpenSSL would prefer one with SHA-384, for which a key of SHA-256 does not fit.
    demand(ssl_.SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") == 1, "AES-128-GCM-SHA256");
    // One group: no second round trip, and the first packet stays small. FIPS providers have it.
    std::array<char, 6> group = {"P-256"};
    demand(ssl_.SSL_CTX_ctrl(context, kCtrlGroupsList, 0, group.data()) == 1, "P-256");
    // A server without the key may show a certificate instead: this client has no authority that it would believe. A server has no
    // certificate to show, and asks for none.
    ssl_.SSL_CTX_set_verify(context, role == Role::Client ? kVerifyPeer : kVerifyNone, nullptr);
    if (role ==
        Role::Server) { // which copies it into the sessions it finds; a client compares it with its own, which has none
      constexpr std::string_view kName = "pycomm";
      ssl_.SSL_CTX_set_session_id_context(context, reinterpret_cast<const unsigned char*>(kName.data()), kName.size());
    }
    ssl_.SSL_CTX_ctrl(context, kCtrlSessionCache, 0, nullptr);
    ssl_.SSL_CTX_set_num_tickets(context, 0);
    ssl_.SSL_CTX_set_max_early_data(context, 0);
    ssl_.SSL_CTX_set_recv_max_early_data(context, 0);
    ssl_.SSL_CTX_set_options(context, kOptionNoTicket);
    ssl_.SSL_CTX_clear_options(
        context, kOptionMiddleboxCompat | kOptionAllowNoDhe | kOptionPreferNoDhe | kOptionIgnoreEof | kOptionKtls);
    // No SSL_MODE_RELEASE_BUFFERS: it saves up to 34 KiB per connection, but then every record needs a new buffer, and OpenSSL does nothing
    // more with a connection for which there was no memory. Its rank could not report why it ends.
    ssl_.SSL_CTX_set_psk_use_session_callback(context, useTlsSession);
    ssl_.SSL_CTX_set_psk_find_session_callback(context, findTlsSession);
  } catch (...) {
    ssl_.ERR_clear_error(); // Python's ssl would take the errors in this thread's queue for its own
    ssl_.SSL_CTX_free(context);
    throw;
  }
  return context;
}

Ssl* TlsContext::newSsl(Role role) const {
  Ssl* const ssl = ssl_.SSL_new(role == Role::Client ? client_ : server_);
  if (ssl == nullptr) {
    throw std::bad_alloc();
  }
  role == Role::Client ? ssl_.SSL_set_connect_state(ssl) : ssl_.SSL_set_accept_state(ssl);
  return ssl;
}

Bio* TlsContext::newBio() const {
  Bio* const bio = ssl_.BIO_new(bio_method_);
  if (bio == nullptr) {
    throw std::bad_alloc();
  }
  return bio;
}

SslSession* TlsContext::newSession(Ssl* ssl, const PskIdentity& identity) const {
  const Key key = secret_->derive("pycomm 1 psk" + identity.text());
  constexpr unsigned char kCipher[] = {kTlsCipher >> 8, kTlsCipher & 0xff};
  const SslCipher* const cipher = ssl_.SSL_CIPHER_find(ssl, kCipher);
  SslSession* const session = ssl_.SSL_SESSION_new();
  if (session == nullptr || cipher == nullptr ||
      ssl_.SSL_SESSION_set1_master_key(session, key.bytes(), Key::kNbytes) != 1 ||
      ssl_.SSL_SESSION_set_cipher(session, cipher) != 1 ||
      ssl_.SSL_SESSION_set_protocol_version(session, kTlsVersion) != 1) {
    ssl_.SSL_SESSION_free(session); // takes null
    throw Error(ErrorCode::Internal, "OpenSSL took no pre-shared key");
  }
  (void)ssl_.SSL_SESSION_set_timeout(session, kSessionTimeoutS);
  return session;
}

} // namespace pycomm
