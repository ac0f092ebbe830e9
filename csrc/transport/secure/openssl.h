#pragma once

#include <cstddef>
#include <cstdint>

namespace pycomm {

// The part of OpenSSL's interface that pycomm uses, declared here because its headers need not be where this is built. Names, numbers
// and signatures are OpenSSL's own and the same in 1.1.1 and 3. Handles are opaque.
struct Bio;
struct BioMethod;
struct Ssl;
struct SslCipher;
struct SslContext;
struct SslMethod;
struct SslSession;
struct EvpMd;

/// Functions by OpenSSL's names.
struct OpenSsl {
  // libcrypto
  unsigned long (*OpenSSL_version_num)() = nullptr;
  const char* (*OpenSSL_version)(int) = nullptr;
  void (*ERR_clear_error)() = nullptr;
  unsigned long (*ERR_peek_error)() = nullptr;
  const char* (*ERR_reason_error_string)(unsigned long) = nullptr;
  const EvpMd* (*EVP_sha256)() = nullptr;
  int (*EVP_Digest)(const void*, size_t, unsigned char*, unsigned*, const EvpMd*, void*) = nullptr;
  unsigned char* (*HMAC)(const EvpMd*, const void*, int, const unsigned char*, size_t, unsigned char*, unsigned*) =
      nullptr;
  int (*CRYPTO_memcmp)(const void*, const void*, size_t) = nullptr;
  int (*BIO_get_new_index)() = nullptr;
  BioMethod* (*BIO_meth_new)(int, const char*) = nullptr;
  void (*BIO_meth_free)(BioMethod*) = nullptr;
  int (*BIO_meth_set_write)(BioMethod*, int (*)(Bio*, const char*, int)) = nullptr;
  int (*BIO_meth_set_read)(BioMethod*, int (*)(Bio*, char*, int)) = nullptr;
  int (*BIO_meth_set_ctrl)(BioMethod*, long (*)(Bio*, int, long, void*)) = nullptr;
  Bio* (*BIO_new)(const BioMethod*) = nullptr;
  void (*BIO_set_data)(Bio*, void*) = nullptr;
  void* (*BIO_get_data)(Bio*) = nullptr;
  void (*BIO_set_init)(Bio*, int) = nullptr;
  void (*BIO_set_flags)(Bio*, int) = nullptr;
  void (*BIO_clear_flags)(Bio*, int) = nullptr;
  // libssl
  const SslMethod* (*TLS_method)() = nullptr;
  SslContext* (*SSL_CTX_new)(const SslMethod*) = nullptr;
  void (*SSL_CTX_free)(SslContext*) = nullptr;
  long (*SSL_CTX_ctrl)(SslContext*, int, long, void*) = nullptr;
  uint64_t (*SSL_CTX_set_options)(SslContext*, uint64_t) = nullptr;
  uint64_t (*SSL_CTX_clear_options)(SslContext*, uint64_t) = nullptr;
  int (*SSL_CTX_set_ciphersuites)(SslContext*, const char*) = nullptr;
  void (*SSL_CTX_set_verify)(SslContext*, int, void*) = nullptr;
  int (*SSL_CTX_set_session_id_context)(SslContext*, const unsigned char*, unsigned) = nullptr;
  int (*SSL_CTX_set_num_tickets)(SslContext*, size_t) = nullptr;
  int (*SSL_CTX_set_max_early_data)(SslContext*, uint32_t) = nullptr;
  int (*SSL_CTX_set_recv_max_early_data)(SslContext*, uint32_t) = nullptr;
  void (*SSL_CTX_set_psk_use_session_callback)(
      SslContext*,
      int (*)(Ssl*, const EvpMd*, const unsigned char**, size_t*, SslSession**)) = nullptr;
  void (*SSL_CTX_set_psk_find_session_callback)(
      SslContext*,
      int (*)(Ssl*, const unsigned char*, size_t, SslSession**)) = nullptr;
  Ssl* (*SSL_new)(SslContext*) = nullptr;
  void (*SSL_free)(Ssl*) = nullptr;
  int (*SSL_set_ex_data)(Ssl*, int, void*) = nullptr;
  void* (*SSL_get_ex_data)(const Ssl*, int) = nullptr;
  void (*SSL_set_bio)(Ssl*, Bio*, Bio*) = nullptr;
  void (*SSL_set_connect_state)(Ssl*) = nullptr;
  void (*SSL_set_accept_state)(Ssl*) = nullptr;
  int (*SSL_do_handshake)(Ssl*) = nullptr;
  int (*SSL_read)(Ssl*, void*, int) = nullptr;
  int (*SSL_write)(Ssl*, const void*, int) = nullptr;
  int (*SSL_pending)(const Ssl*) = nullptr;
  int (*SSL_get_error)(const Ssl*, int) = nullptr;
  int (*SSL_key_update)(Ssl*, int) = nullptr;
  int (*SSL_shutdown)(Ssl*) = nullptr;
  size_t (*SSL_get_client_random)(const Ssl*, unsigned char*, size_t) = nullptr;
  int (*SSL_session_reused)(const Ssl*) = nullptr;
  int (*SSL_version)(const Ssl*) = nullptr;
  const SslCipher* (*SSL_get_current_cipher)(const Ssl*) = nullptr;
  uint16_t (*SSL_CIPHER_get_protocol_id)(const SslCipher*) = nullptr;
  const SslCipher* (*SSL_CIPHER_find)(Ssl*, const unsigned char*) = nullptr;
  SslSession* (*SSL_SESSION_new)() = nullptr;
  void (*SSL_SESSION_free)(SslSession*) = nullptr;
  int (*SSL_SESSION_set1_master_key)(SslSession*, const unsigned char*, size_t) = nullptr;
  int (*SSL_SESSION_set_cipher)(SslSession*, const SslCipher*) = nullptr;
  int (*SSL_SESSION_set_protocol_version)(SslSession*, int) = nullptr;
  long (*SSL_SESSION_set_timeout)(SslSession*, long) = nullptr;
};

/// The functions out of `library`, a handle of dlopen() of libssl; `name` is for the error. Throws Error(Unsupported) if one is
/// missing or the version is older than 3.0.
[[nodiscard]] OpenSsl takeOpenSsl(void* library, const char* name);

/// OpenSSL: the one that is in this process already, or else the system's, loaded now and never unloaded. In Python, `import ssl` comes
/// first, so that it is the interpreter's own. Throws Error(Unsupported) that says what to install. The first call takes some
/// milliseconds and the loader's lock, so it does not belong on an event loop. Any thread.
[[nodiscard]] const OpenSsl& openSsl();

} // namespace pycomm
