// OpenSSL by dlopen: no header and no library of it are needed to build, and its security fixes come with the
// interpreter or the system.
#include "transport/secure/openssl.h"

#include <dlfcn.h>

#include <string>

#include "base/error.h"

namespace pycomm {
namespace {

constexpr const char* kLibraryName = "libssl.so.3"; // libssl3.so is Mozilla's NSS
constexpr unsigned long kOldestVersion = 0x30000000;
constexpr const char* kInstallHint =
    "apt install libssl3, or dnf install openssl-libs, or conda install \"openssl>=3\"; "
    "or run without a secret: PYCOMM_SECRET_FILE=none and no PYCOMM_SECURITY=require, on every host";

template <class Function>
void findFunction(void* library, const char* name, Function& function, std::string& missing) {
  // Also looks into libcrypto, which libssl depends on: so the two always fit each other.
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr) {
    missing += missing.empty() ? name : std::string(", ") + name;
  }
}

void* openLibrary() {
  // Two versions of one library in a process are trouble: conda's _ssl, for one, fails if the system's libssl came first. If a
  // libssl.so.3 is mapped from any path, this name finds that one by its SONAME. So pycomm/_group/secrets.py imports ssl before this runs.
  // An interpreter that has OpenSSL linked into itself may export its symbols, and without RTLD_DEEPBIND those of the library would be
  // bound to them. A sanitizer's run time ends the process if it sees that flag.
  const bool sanitized = ::dlsym(RTLD_DEFAULT, "__sanitizer_print_stack_trace") != nullptr;
  void* const library = ::dlopen(kLibraryName, RTLD_NOW | RTLD_LOCAL | (sanitized ? 0 : RTLD_DEEPBIND));
  if (library == nullptr) {
    const char* const why = ::dlerror();
    throw Error(
        ErrorCode::Unsupported,
        std::string("a secret needs OpenSSL 3, and ") + kLibraryName +
            " could not be loaded: " + (why == nullptr ? "no reason given" : why),
        kInstallHint);
  }
  return library;
}

} // namespace

OpenSsl takeOpenSsl(void* library, const char* name) {
  OpenSsl f;
  std::string missing;
#define PYCOMM_FIND(function) findFunction(library, #function, f.function, missing)
  PYCOMM_FIND(OpenSSL_version_num);
  PYCOMM_FIND(OpenSSL_version);
  PYCOMM_FIND(ERR_clear_error);
  PYCOMM_FIND(ERR_peek_error);
  PYCOMM_FIND(ERR_reason_error_string);
  PYCOMM_FIND(EVP_sha256);
  PYCOMM_FIND(EVP_Digest);
  PYCOMM_FIND(HMAC);
  PYCOMM_FIND(CRYPTO_memcmp);
  PYCOMM_FIND(BIO_get_new_index);
  PYCOMM_FIND(BIO_meth_new);
  PYCOMM_FIND(BIO_meth_free);
  PYCOMM_FIND(BIO_meth_set_write);
  PYCOMM_FIND(BIO_meth_set_read);
  PYCOMM_FIND(BIO_meth_set_ctrl);
  PYCOMM_FIND(BIO_new);
  PYCOMM_FIND(BIO_set_data);
  PYCOMM_FIND(BIO_get_data);
  PYCOMM_FIND(BIO_set_init);
  PYCOMM_FIND(BIO_set_flags);
  PYCOMM_FIND(BIO_clear_flags);
  PYCOMM_FIND(TLS_method);
  PYCOMM_FIND(SSL_CTX_new);
  PYCOMM_FIND(SSL_CTX_free);
  PYCOMM_FIND(SSL_CTX_ctrl);
  PYCOMM_FIND(SSL_CTX_set_options);
  PYCOMM_FIND(SSL_CTX_clear_options);
  PYCOMM_FIND(SSL_CTX_set_ciphersuites);
  PYCOMM_FIND(SSL_CTX_set_verify);
  PYCOMM_FIND(SSL_CTX_set_session_id_context);
  PYCOMM_FIND(SSL_CTX_set_num_tickets);
  PYCOMM_FIND(SSL_CTX_set_max_early_data);
  PYCOMM_FIND(SSL_CTX_set_recv_max_early_data);
  PYCOMM_FIND(SSL_CTX_set_psk_use_session_callback);
  PYCOMM_FIND(SSL_CTX_set_psk_find_session_callback);
  PYCOMM_FIND(SSL_new);
  PYCOMM_FIND(SSL_free);
  PYCOMM_FIND(SSL_set_ex_data);
  PYCOMM_FIND(SSL_get_ex_data);
  PYCOMM_FIND(SSL_set_bio);
  PYCOMM_FIND(SSL_set_connect_state);
  PYCOMM_FIND(SSL_set_accept_state);
  PYCOMM_FIND(SSL_do_handshake);
  PYCOMM_FIND(SSL_read);
  PYCOMM_FIND(SSL_write);
  PYCOMM_FIND(SSL_pending);
  PYCOMM_FIND(SSL_get_error);
  PYCOMM_FIND(SSL_key_update);
  PYCOMM_FIND(SSL_shutdown);
  PYCOMM_FIND(SSL_get_client_random);
  PYCOMM_FIND(SSL_session_reused);
  PYCOMM_FIND(SSL_version);
  PYCOMM_FIND(SSL_get_current_cipher);
  PYCOMM_FIND(SSL_CIPHER_get_protocol_id);
  PYCOMM_FIND(SSL_CIPHER_find);
  PYCOMM_FIND(SSL_SESSION_new);
  PYCOMM_FIND(SSL_SESSION_free);
  PYCOMM_FIND(SSL_SESSION_set1_master_key);
  PYCOMM_FIND(SSL_SESSION_set_cipher);
  PYCOMM_FIND(SSL_SESSION_set_protocol_version);
  PYCOMM_FIND(SSL_SESSION_set_timeout);
#undef PYCOMM_FIND
  if (!missing.empty()) {
    throw Error(
        ErrorCode::Unsupported,
        std::string("a secret needs OpenSSL 3, and ") + name + " lacks " + missing,
        kInstallHint);
  }
  if (f.OpenSSL_version_num() < kOldestVersion) {
    throw Error(
        ErrorCode::Unsupported,
        std::string("a secret needs OpenSSL 3, and ") + name + " is " + f.OpenSSL_version(0),
        kInstallHint);
  }
  return f;
}

const OpenSsl& openSsl() {
  static const OpenSsl functions = takeOpenSsl(openLibrary(), kLibraryName);
  return functions;
}

} // namespace pycomm
