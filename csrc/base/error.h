#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace pycomm {

/// What kind of thing went wrong. The numbers travel in error frames: never reuse one.
enum class ErrorCode : uint16_t {
  Ok = 0,
  // found locally, before anything moves
  InvalidArgument = 1,
  Unsupported = 2,
  // reaching each other
  RendezvousTimeout = 10,
  StoreLost = 11,
  ConnectFailed = 12,
  DuplicateRank = 13,
  ConfigMismatch = 14,
  VersionMismatch = 15,
  NoInterface = 16,
  PortsExhausted = 17,
  // during an operation
  CollectiveMismatch = 30,
  Timeout = 31,
  PeerDead = 32, ///< the peer's process ended without saying goodbye
  PeerUnresponsive = 33, ///< the peer is there and silent
  PeerLeft = 34, ///< the peer closed its group in good order while we still needed it
  ConnectionReset = 35,
  ProtocolViolation = 36, ///< bytes that no pycomm peer of this version sends
  DataCorrupt = 37,
  // this process
  Aborted = 50,
  ShutDown = 51,
  Forked = 52,
  OutOfMemory = 53,
  TooManyFiles = 54,
  SystemError = 55,
  Internal = 56,
  NoSharedMemory = 57, ///< there is no room for what the ranks of a host share
};

/// "PEER_DEAD": the name in messages and in Python; "UNKNOWN" for a number that is no code.
[[nodiscard]] const char* errorCodeName(ErrorCode code) noexcept;

/// Everything known about one failure. A plain value: copied, sent to other ranks, printed. Fields that are not
/// known keep their defaults and are left out of the text.
struct ErrorRecord {
  ErrorCode code = ErrorCode::Internal;
  std::string summary; ///< one plain sentence: what failed
  std::string hint; ///< what to try
  std::string cause; ///< errno name and text, or the exception underneath
  int rank = -1; ///< the rank that noticed
  std::string host;
  int peer = -1; ///< the rank that is to blame, or that was waited for
  std::string peer_host;
  std::string group;
  int64_t epoch = -1;
  std::string op; ///< "all_reduce"
  int64_t sequence = -1; ///< the group's operation number, or its 64-bit id
  std::string dtype;
  int64_t numel = -1;
  int64_t bytes_done = -1;
  int64_t bytes_total = -1;
  std::string phase; ///< "rendezvous", "connect", "transfer", …
  int64_t elapsed_ms = -1;

  /// "SUMMARY [code=PEER_DEAD rank=0 host=a peer=2 …] Try: HINT" on one line.
  [[nodiscard]] std::string text() const;
  /// Only the key=value pairs, in a fixed order.
  [[nodiscard]] std::string line() const;

  /// A compact binary form for error frames. Texts that are too long are cut.
  [[nodiscard]] std::string serialize() const;
  /// Takes any bytes, and returns nothing if no rank of a group of `size` wrote them: they do not parse, the code is Ok or unknown, or
  /// `rank` or `peer` is not in [-1, size). Texts come back printable().
  [[nodiscard]] static std::optional<ErrorRecord> deserialize(const std::string& bytes, int size);
  /// No serialized record is longer.
  static constexpr size_t kMaxSerializedNbytes = 16 << 10;
};

/// The only exception type thrown below the torch seam.
class Error : public std::runtime_error {
 public:
  explicit Error(ErrorRecord record);
  Error(ErrorCode code, std::string summary, std::string hint = "");

  [[nodiscard]] const ErrorRecord& record() const noexcept {
    return record_;
  }

 private:
  ErrorRecord record_;
};

/// "ECONNRESET (Connection reset by peer)". Thread-safe.
[[nodiscard]] std::string errnoText(int error_number);

/// The name of this host, as gethostname() tells it.
[[nodiscard]] std::string localHostName();

} // namespace pycomm
