#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "transport/secure/openssl.h"
#include "transport/secure/secret.h"
#include "transport/secure/seen_hellos.h"

namespace pycomm {

/// 128 random bits that a process draws for each group, in 32 hexadecimal digits. Not a secret.
using ProcessId = std::string;
[[nodiscard]] ProcessId newProcessId();
[[nodiscard]] bool isProcessId(std::string_view text);

/// Which key two processes use: sent in clear when a connection opens. ASCII, so that other programs can send it, too.
///
///   pc1.<key id>.l.<client's process id>.<server's process id>
struct PskIdentity {
  std::string key_id;
  ProcessId client;
  ProcessId server;

  [[nodiscard]] std::string text() const;
  /// Takes any bytes.
  [[nodiscard]] static std::optional<PskIdentity> parse(std::string_view text);
};

struct TlsOptions {
  /// After so many records the writer of a direction changes its key. AES-GCM may encrypt 2^24.5 records with one key (RFC 8446, 5.5);
  /// OpenSSL does not count them.
  uint64_t records_per_key = uint64_t{1} << 22;
};

/// TLS 1.3 between holders of one secret: a pre-shared key for each ordered pair of processes, with a fresh P-256 exchange
/// (psk_dhe_ke), and AES-128-GCM-SHA256. No certificates, no session tickets, no early data; there is nothing to negotiate.
///
/// Shared by all links of a process, on any thread; keeps the secret for as long as one of them exists.
class TlsContext {
 public:
  /// Throws Error(Unsupported) if there is no OpenSSL 3. Takes some milliseconds the first time. `ssl` outlives this.
  TlsContext(
      std::shared_ptr<const Secret> secret,
      ProcessId self,
      const TlsOptions& options = {},
      const OpenSsl& ssl = openSsl());
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  [[nodiscard]] const OpenSsl& ssl() const noexcept {
    return ssl_;
  }
  [[nodiscard]] const Secret& secret() const noexcept {
    return *secret_;
  }
  [[nodiscard]] const ProcessId& self() const noexcept {
    return self_;
  }
  [[nodiscard]] const TlsOptions& options() const noexcept {
    return options_;
  }

  enum class Role { Client, Server };
  /// A connection whose callbacks find their link in ex data 0 (TlsLink). SSL_free() it.
  [[nodiscard]] Ssl* newSsl(Role role) const;
  [[nodiscard]] Bio* newBio() const;
  /// The key of this identity, in the form that OpenSSL's callbacks return. A new one each time: OpenSSL's sessions age, and one that is
  /// kept fails after 304 seconds.
  [[nodiscard]] SslSession* newSession(Ssl* ssl, const PskIdentity& identity) const;
  /// The first messages of clients that knew the key. They were for this process and group, so no other process needs to know them.
  [[nodiscard]] SeenHellos& seenHellos() const noexcept {
    return seen_hellos_;
  }

 private:
  [[nodiscard]] SslContext* newContext(Role role) const;

  const OpenSsl& ssl_;
  std::shared_ptr<const Secret> secret_;
  ProcessId self_;
  TlsOptions options_;
  const uint32_t forks_;
  SslContext* client_ = nullptr;
  SslContext* server_ = nullptr;
  BioMethod* bio_method_ = nullptr;
  mutable SeenHellos seen_hellos_;
};

/// The process that a connection goes to, if it is to be in TLS; without a context it is plain.
struct TlsTarget {
  std::shared_ptr<const TlsContext> context;
  ProcessId server;
};

/// TLS_AES_128_GCM_SHA256 and TLS 1.3, as TLS numbers them.
inline constexpr uint16_t kTlsCipher = 0x1301;
inline constexpr int kTlsVersion = 0x0304;

} // namespace pycomm
