#include "fuzz/scripted_tls.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "fuzz/endpoint.h"
#include "fuzz/promise.h"

namespace pycomm::fuzz {
namespace {

// OpenSSL's numbers (openssl/ssl.h, openssl/bio.h).
constexpr int kNoError = 0;
constexpr int kErrorSsl = 1;
constexpr int kErrorWantRead = 2;
constexpr int kErrorSyscall = 5;
constexpr int kErrorZeroReturn = 6;
constexpr int kBioRetry = 8;

constexpr uint8_t kEnd = 0x15;
constexpr uint8_t kHandshake = 0x16;
constexpr uint8_t kData = 0x17;
constexpr uint8_t kNewKey = 0x18;
constexpr size_t kHeaderNbytes = 5;

struct Connection {
  Bio* bio = nullptr;
  uint64_t number = 0; ///< in place of the client's random number: no two are alike
  bool client = false;
  bool greeted = false; ///< its own part of the handshake was sent
  bool up = false;
  int error = kNoError;
  std::string header;
  std::string body;
  std::string data; ///< of a record, not yet asked for
};

std::map<const Ssl*, Connection>& connections() {
  static std::map<const Ssl*, Connection> all;
  return all;
}

uint8_t current_trouble = 0;
int (*read_bio)(Bio*, char*, int) = nullptr;
int (*write_bio)(Bio*, const char*, int) = nullptr;
int (*use_session)(Ssl*, const EvpMd*, const unsigned char**, size_t*, SslSession**) = nullptr;
int (*find_session)(Ssl*, const unsigned char*, size_t, SslSession**) = nullptr;

bool has(uint8_t trouble) {
  return (current_trouble & trouble) != 0;
}

bool wantsRetry(const Bio* bio) {
  static auto* const test = reinterpret_cast<int (*)(const Bio*, int)>(
      ::dlsym(::dlopen("libcrypto.so.3", RTLD_NOW | RTLD_NOLOAD), "BIO_test_flags"));
  promise(test != nullptr, "no libcrypto.so.3");
  return test(bio, kBioRetry) != 0;
}

/// Reads until `into` has `nbytes`; sets the error if it has not.
bool fill(Connection& one, std::string& into, size_t nbytes) {
  while (into.size() < nbytes) {
    std::string part(nbytes - into.size(), '\0');
    const int got = read_bio(one.bio, part.data(), static_cast<int>(part.size()));
    promise(got <= static_cast<int>(part.size()), "more bytes than there was room for");
    if (got <= 0) {
      one.error = got == 0 ? kErrorSyscall : wantsRetry(one.bio) ? kErrorWantRead : kErrorSsl;
      return false;
    }
    into.append(part, 0, static_cast<size_t>(got));
  }
  return true;
}

/// The next record's content; 0 if there is none yet, or never.
uint8_t nextRecord(Connection& one, std::string& content) {
  if (!fill(one, one.header, kHeaderNbytes)) {
    return 0;
  }
  const auto byte = [&](size_t at) { return static_cast<uint8_t>(one.header[at]); };
  if (byte(1) != 3 || byte(2) != 3) {
    one.error = kErrorSsl;
    return 0;
  }
  if (!fill(one, one.body, (size_t{byte(3)} << 8) | byte(4))) {
    return 0;
  }
  const uint8_t type = byte(0);
  content = std::move(one.body);
  one.header.clear();
  one.body.clear();
  return type;
}

bool send(Connection& one, uint8_t type, const std::string& content) {
  const std::string bytes = ScriptedTls::record(type, content);
  if (write_bio(one.bio, bytes.data(), static_cast<int>(bytes.size())) != static_cast<int>(bytes.size())) {
    one.error = kErrorSsl;
    return false;
  }
  return true;
}

int fail(Connection& one) {
  one.error = kErrorSsl;
  return -1;
}

int shake(Ssl* ssl) {
  Connection& one = connections().at(ssl);
  if (one.up) {
    return 1;
  }
  SslSession* session = nullptr;
  if (one.client && !one.greeted) {
    const unsigned char* identity = nullptr;
    size_t nbytes = 0;
    if (use_session(ssl, nullptr, &identity, &nbytes, &session) != 1) {
      return fail(one);
    }
    openSsl().SSL_SESSION_free(session);
    if (!send(one, kHandshake, {reinterpret_cast<const char*>(identity), nbytes})) {
      return fail(one);
    }
    one.greeted = true;
  }
  std::string content;
  const uint8_t type = nextRecord(one, content);
  if (type == 0) {
    return -1;
  }
  if (type != kHandshake) {
    return fail(one);
  }
  if (!one.client) {
    const auto* const identity = reinterpret_cast<const unsigned char*>(content.data());
    if (find_session(ssl, identity, content.size(), &session) != 1 || session == nullptr) {
      return fail(one);
    }
    openSsl().SSL_SESSION_free(session);
    if (has(kHandshakeFails) || !send(one, kHandshake, "hello")) {
      return fail(one);
    }
  } else if (has(kHandshakeFails)) {
    return fail(one);
  }
  one.up = true;
  one.error = kNoError;
  return 1;
}

int readData(Ssl* ssl, void* into, int nbytes) {
  Connection& one = connections().at(ssl);
  promise(one.up && nbytes > 0, "a read that OpenSSL would refuse");
  while (one.data.empty()) {
    std::string content;
    switch (nextRecord(one, content)) {
      case 0:
        return -1;
      case kData:
        one.data = std::move(content);
        break;
      case kEnd:
        one.error = kErrorZeroReturn;
        return 0;
      case kNewKey:
        if (!send(one, kNewKey, "")) {
          return -1;
        }
        break;
      default:
        return fail(one);
    }
  }
  const size_t most = has(kOneByteReads) ? 1 : static_cast<size_t>(nbytes);
  const size_t count = std::min(most, one.data.size());
  std::copy_n(one.data.begin(), count, static_cast<char*>(into));
  one.data.erase(0, count);
  one.error = kNoError;
  return static_cast<int>(count);
}

OpenSsl scripted() {
  OpenSsl table = openSsl();
  table.BIO_meth_set_read = [](BioMethod* method, int (*function)(Bio*, char*, int)) {
    read_bio = function;
    return openSsl().BIO_meth_set_read(method, function);
  };
  table.BIO_meth_set_write = [](BioMethod* method, int (*function)(Bio*, const char*, int)) {
    write_bio = function;
    return openSsl().BIO_meth_set_write(method, function);
  };
  table.SSL_CTX_set_psk_use_session_callback = [](SslContext*, auto function) { use_session = function; };
  table.SSL_CTX_set_psk_find_session_callback = [](SslContext*, auto function) { find_session = function; };
  table.SSL_new = [](SslContext* context) {
    Ssl* const ssl = openSsl().SSL_new(context);
    static uint64_t opened = 0;
    connections()[ssl] = {};
    connections()[ssl].number = ++opened;
    return ssl;
  };
  table.SSL_free = [](Ssl* ssl) {
    promise(connections().erase(ssl) == 1, "a connection that is freed twice");
    openSsl().SSL_free(ssl);
  };
  table.SSL_set_bio = [](Ssl* ssl, Bio* in, Bio* out) {
    connections().at(ssl).bio = in;
    openSsl().SSL_set_bio(ssl, in, out);
  };
  table.SSL_set_connect_state = [](Ssl* ssl) { connections().at(ssl).client = true; };
  table.SSL_set_accept_state = [](Ssl*) {};
  table.SSL_do_handshake = shake;
  table.SSL_read = readData;
  table.SSL_write = [](Ssl* ssl, const void* bytes, int nbytes) {
    Connection& one = connections().at(ssl);
    const std::string content(static_cast<const char*>(bytes), static_cast<size_t>(nbytes));
    return !has(kWriteFails) && send(one, kData, content) ? nbytes : fail(one);
  };
  table.SSL_pending = [](const Ssl* ssl) { return static_cast<int>(connections().at(ssl).data.size()); };
  table.SSL_get_error = [](const Ssl* ssl, int) { return connections().at(ssl).error; };
  table.SSL_key_update = [](Ssl* ssl, int) {
    return !has(kKeyUpdateFails) && send(connections().at(ssl), kNewKey, "") ? 1 : 0;
  };
  table.SSL_shutdown = [](Ssl* ssl) { return send(connections().at(ssl), kEnd, "") ? 0 : -1; };
  table.SSL_get_client_random = [](const Ssl* ssl, unsigned char* into, size_t nbytes) {
    std::fill_n(into, nbytes, static_cast<unsigned char>(0));
    const uint64_t number = connections().at(ssl).number;
    std::memcpy(into, &number, sizeof number);
    return nbytes;
  };
  table.SSL_session_reused = [](const Ssl*) { return has(kNotReused) ? 0 : 1; };
  table.SSL_version = [](const Ssl*) { return has(kOtherVersion) ? kTlsVersion - 1 : kTlsVersion; };
  table.SSL_get_current_cipher = [](const Ssl* ssl) {
    constexpr unsigned char kCipher[] = {kTlsCipher >> 8, kTlsCipher & 0xff};
    return has(kOtherCipher) ? nullptr : openSsl().SSL_CIPHER_find(const_cast<Ssl*>(ssl), kCipher);
  };
  return table;
}

} // namespace

std::shared_ptr<const TlsContext> ScriptedTls::context(const ProcessId& self, const TlsOptions& options) {
  static const OpenSsl table = scripted();
  static const auto secret = std::make_shared<const Secret>(fuzzSecret());
  return std::make_shared<const TlsContext>(secret, self, options, table);
}

void ScriptedTls::misbehave(uint8_t trouble) {
  current_trouble = trouble;
}

std::string ScriptedTls::record(uint8_t type, const std::string& content) {
  std::string bytes = {static_cast<char>(type), 3, 3};
  bytes += static_cast<char>(content.size() >> 8);
  bytes += static_cast<char>(content.size() & 0xff);
  return bytes + content;
}

size_t ScriptedTls::open() {
  return connections().size();
}

} // namespace pycomm::fuzz
