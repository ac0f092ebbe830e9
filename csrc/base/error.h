#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>

#include "base/error_phase.h"
#include "base/job_ranks.h"

namespace pycomm {

/// The kind of a failure. The numbers travel in error frames: never reuse one.
enum class ErrorCode : uint16_t {
  Ok = 0,
  // found locally, before anything is sent
  InvalidArgument = 1,
  Unsupported = 2,
  // while ranks connect
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
  PeerDead = 32, ///< the peer's process ended without a goodbye
  PeerUnresponsive = 33, ///< the peer is connected but silent
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
  NoSharedMemory = 57, ///< no room for the memory that the ranks of a host share
};

/// "PEER_DEAD": the name in error texts and in Python; "UNKNOWN" for a number that is not a code.
[[nodiscard]] const char* errorCodeName(ErrorCode code) noexcept;

/// Everything known about one failure. A plain value: copied, sent to other ranks, printed. Unknown fields keep their
/// defaults and do not appear in the text. Ranks have their numbers in the job (JobRanks), in fields and in sentences.
struct ErrorRecord {
  static constexpr int kThisEnd = -2; ///< the end of a link at which the error is seen
  ErrorCode code = ErrorCode::Internal;
  std::string summary; ///< one plain sentence: what failed
  std::string hint; ///< what to try
  std::string cause; ///< errno name and text, or the text of the underlying exception
  int rank = -1; ///< the rank that noticed the failure
  std::string host;
  int peer =
      -1; ///< the rank that caused it, or that this rank waited for; a link, which knows no ranks, may say kThisEnd
  std::string peer_host;
  std::string group;
  std::string
      group_ranks; ///< JobRanks::list() of the group; does not travel: every rank that reads a record knows its group
  int64_t epoch = -1;
  std::string op; ///< "all_reduce"
  int64_t sequence = -1; ///< the group's operation number, or its 64-bit id
  std::string dtype;
  int64_t numel = -1;
  int64_t bytes_done = -1;
  int64_t bytes_total = -1;
  ErrorPhase phase;
  int64_t elapsed_ms = -1;

  /// "SUMMARY [code=PEER_DEAD rank=0 host=a peer=2 …] Try: HINT" on one line.
  [[nodiscard]] std::string text() const;
  /// Only the key=value pairs, in a fixed order.
  [[nodiscard]] std::string line() const;

  /// A compact binary form for error frames. Texts that are too long are truncated.
  [[nodiscard]] std::string serialize() const;
  /// Accepts any bytes. Returns nullopt if no rank of a group of `size` can have written them: they do not parse, the
  /// code is Ok or unknown, or `rank` or `peer` is neither -1 nor one of the group. The texts of the result are printable().
  [[nodiscard]] static std::optional<ErrorRecord> deserialize(
      const std::string& bytes,
      int size,
      const JobRanks& ranks = {});
  /// Upper bound of serialize().size().
  static constexpr size_t kMaxSerializedNbytes = 16 << 10;
};

/// The exception of every failure that leaves a floor below torch's; std::bad_alloc passes too.
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

/// OutOfMemory, with a text that needs no memory, and with the hint if there is memory for that.
[[nodiscard]] ErrorRecord noMemoryLeft(const char* hint = "") noexcept;

/// The record of an Error, or one of another exception: its summary is `failed` and the exception's text. noMemoryLeft() if there is
/// none for that.
[[nodiscard]] ErrorRecord recordOf(const std::exception& exception, const char* failed) noexcept;

/// "ECONNRESET (Connection reset by peer)". Thread-safe.
[[nodiscard]] std::string errnoText(int error_number);

/// The name of this host, from gethostname().
[[nodiscard]] std::string localHostName();

} // namespace pycomm
