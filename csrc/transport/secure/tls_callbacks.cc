#include "transport/secure/tls_callbacks.h"

#include "transport/secure/tls_link.h"

namespace pycomm {
namespace {

constexpr int kBioRead = 1; // BIO_FLAGS_READ
constexpr int kBioRetry = 8; // BIO_FLAGS_SHOULD_RETRY
constexpr int kBioAll = 15;
constexpr int kBioEof = 2; // BIO_CTRL_EOF
constexpr int kBioFlush = 11; // BIO_CTRL_FLUSH

TlsLink& linkOf(Ssl* ssl) {
  return *static_cast<TlsLink*>(openSsl().SSL_get_ex_data(ssl, 0));
}

TlsBio& bioOf(Bio* bio) {
  return *static_cast<TlsBio*>(openSsl().BIO_get_data(bio));
}

} // namespace

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
