#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/secure/tls_context.h"

namespace pycomm::fuzz {

/// What an OpenSSL might do that is not expected of it, a bit each. 0: it does what it is asked.
enum ScriptedTrouble : uint8_t {
  kNotReused = 1, ///< the handshake ends well and has used no key
  kOtherVersion = 2,
  kOtherCipher = 4,
  kWriteFails = 8,
  kKeyUpdateFails = 16,
  kHandshakeFails = 32, ///< after the identity was accepted: the binder does not verify
  kOneByteReads = 64, ///< SSL_read gives one byte per call
};

/// A TLS engine that encrypts nothing and believes everybody, so that a fuzzer reaches what lies behind a handshake that it could never
/// guess. It is OpenSSL's table with other functions for the handshake, reading and writing: contexts, BIOs and handles are real ones.
///
/// Its records look like TLS's: a type, 3, 3, two bytes of length, and the content in clear.
///   0x16  of a client: its PskIdentity. Of a server: any text. It ends the handshake.
///   0x17  data
///   0x15  the end
///   0x18  a change of the key that wants an answer
/// All other records are broken ones.
///
/// One thread only, as a fuzzer is.
class ScriptedTls {
 public:
  /// A context for process `self` with fuzzSecret().
  [[nodiscard]] static std::shared_ptr<const TlsContext> context(const ProcessId& self, const TlsOptions& options = {});
  /// Bits of ScriptedTrouble, for what happens from now on.
  static void misbehave(uint8_t trouble);
  [[nodiscard]] static std::string record(uint8_t type, const std::string& content);
  /// Connections that have not been freed.
  [[nodiscard]] static size_t open();
};

} // namespace pycomm::fuzz
