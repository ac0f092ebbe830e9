#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/secure/openssl.h"
#include "transport/secure/secret.h"

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

/// The random number of a ClientHello (RFC 8446, 4.1.2). A client draws a new one for each connection.
using ClientRandom = std::array<unsigned char, 32>;

/// The first messages of TLS that this process has taken from holders of the secret, so that one that somebody has recorded and repeats is
/// noticed. It is bounded: if there are more, the oldest is forgotten. Any thread.
class SeenHellos {
 public:
  /// More connections than a process of a group takes: of 1,000 ranks four each. 32 KiB.
  static constexpr size_t kMost = 4096;

  /// Remembers it; false if it was there already. Only for a message of which it is known that its sender knew the secret: others could
  /// fill the memory.
  [[nodiscard]] bool add(const ClientRandom& random) {
    uint64_t mark = 0; // 8 random bytes tell a few thousand apart; a client that is mistaken for another tries again
    std::memcpy(&mark, random.data(), sizeof mark);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const uint64_t seen : marks_) {
      if (seen == mark) {
        return false;
      }
    }
    if (marks_.size() < kMost) {
      marks_.push_back(mark);
    } else {
      marks_[oldest_] = mark;
      oldest_ = (oldest_ + 1) % kMost;
    }
    return true;
  }

 private:
  std::mutex mutex_;
  std::vector<uint64_t> marks_;
  size_t oldest_ = 0; ///< once there are kMost
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
