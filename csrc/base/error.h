#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

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
  /// In a record that a group agrees on: a link broke although its peer is still there. Thrown by a Link: the connection broke or ended; a
  /// group makes PeerDead of that, unless a goodbye explains it. To an elastic::Agreement: a connection broke, which does not show that its
  /// peer's process has ended.
  ConnectionReset = 35,
  ProtocolViolation = 36, ///< bytes that no pycomm peer of this version sends
  DataCorrupt = 37,
  QuorumLost = 38, ///< of a group whose steps survive deaths: too few members are left, or reached, to go on
  LeftBehind = 39, ///< of such a group: the other members went on without this process
  JoinRefused = 40, ///< of a process that wants to become a member of such a group, and cannot
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

/// How far an operation, or a group that is being made, had come when it failed. Ranks compare phases when they choose the cause of a
/// failure. kTexts is what errors print, error frames carry and flight records store.
class ErrorPhase {
 public:
  enum Value : uint8_t {
    Unknown, ///< not printed
    Rendezvous,
    Resolve, ///< of a host name
    Connect,
    NcclInit,
    Matching, ///< before the ranks had compared the operation, or because they differed
    NotStarted, ///< the group had failed before
    NotEntered, ///< of a deadline: some rank has not entered the operation
    CopyToHost, ///< of a CUDA tensor
    Transfer,
    Wait, ///< only the time of one call of wait() was over
    Reset, ///< a control link was reset, which may have swallowed a goodbye. Only in reports between ranks
  };
  static constexpr std::array<const char*, Reset + 1> kTexts = {
      "",
      "rendezvous",
      "resolve",
      "connect",
      "nccl init",
      "matching",
      "not_started",
      "not_entered",
      "copy_to_host",
      "transfer",
      "wait",
      "reset",
  };

  constexpr ErrorPhase(Value value = Unknown) noexcept : value_(value) {}

  /// nullopt if no phase has this text.
  [[nodiscard]] static constexpr std::optional<Value> find(std::string_view text) noexcept {
    for (size_t i = 0; i < kTexts.size(); ++i) {
      if (kTexts[i] == text) {
        return static_cast<Value>(i);
      }
    }
    return std::nullopt;
  }
  [[nodiscard]] constexpr const char* text() const noexcept {
    return kTexts[value_];
  }
  [[nodiscard]] constexpr bool known() const noexcept {
    return value_ != Unknown;
  }
  friend constexpr bool operator==(ErrorPhase, ErrorPhase) noexcept = default;

 private:
  Value value_;
};

/// Everything known about one failure. A plain value: copied, sent to other ranks, printed. Unknown fields keep their
/// defaults and do not appear in the text. Ranks have their numbers in the job (JobRanks), in fields and in sentences.
struct ErrorRecord {
  static constexpr int kThisEnd = -2; ///< the end of a link at which the error is seen
  ErrorCode code = ErrorCode::Internal;
  std::string summary; ///< one plain sentence: what failed
  std::string hint; ///< what to try
  std::string cause; ///< errno name and text, or the text of the underlying exception
  int rank = -1; ///< between ranks: the one that noticed the failure; errorOf() makes it the one that raises it
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

  /// "SUMMARY [code=PEER_DEAD peer=2 peer_host=b rank=0 …] Try: HINT" on one line.
  [[nodiscard]] std::string text() const;
  /// Only the key=value pairs, in a fixed order, `peer` first after `code`. Pairs that say nothing are left out: the group if it is
  /// the default one (it has no group_ranks), epoch 0, and bytes if there are none to receive.
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

/// The exception of every failure that leaves a layer below torch's; std::bad_alloc passes too.
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

/// An error record for a failed system call. If the process ran out of descriptors or memory, the code is TooManyFiles
/// or OutOfMemory instead of `code`: then the peer is not to blame.
[[nodiscard]] ErrorRecord systemError(ErrorCode code, const std::string& summary, int error_number);

/// The name of this host, from gethostname().
[[nodiscard]] std::string localHostName();

} // namespace pycomm
