#include "base/error.h"

#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <string_view>
#include <utility>

#include "base/printable.h"

namespace pycomm {
namespace {

/// A text of a record, and its maximum length in an error frame: a peer's bytes never decide how much memory is
/// allocated.
struct TextField {
  std::string ErrorRecord::* text;
  uint16_t max_nbytes;
};

// In the order in which they travel.
constexpr std::array<TextField, 8> kTexts = {{
    {&ErrorRecord::summary, 4096},
    {&ErrorRecord::hint, 4096},
    {&ErrorRecord::cause, 4096},
    {&ErrorRecord::host, 255},
    {&ErrorRecord::peer_host, 255},
    {&ErrorRecord::group, 1024},
    {&ErrorRecord::op, 64},
    {&ErrorRecord::dtype, 64},
}};
constexpr uint16_t kMaxPhaseNbytes = 64; // its text travels last

constexpr size_t longestRecord() {
  size_t nbytes = 9 * sizeof(int64_t) + sizeof(uint16_t) + kMaxPhaseNbytes;
  for (const TextField& field : kTexts) {
    nbytes += sizeof(uint16_t) + field.max_nbytes;
  }
  return nbytes;
}
static_assert(longestRecord() <= ErrorRecord::kMaxSerializedNbytes, "what a peer may send fits into what is read");

void putText(std::string& out, const std::string& text, uint16_t max_nbytes) {
  const auto length = static_cast<uint16_t>(text.size() < max_nbytes ? text.size() : max_nbytes);
  out.append(reinterpret_cast<const char*>(&length), sizeof length);
  out.append(text, 0, length);
}

void putNumber(std::string& out, int64_t value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

constexpr const char* kUnknownCode = "UNKNOWN";

struct Reader {
  const std::string& bytes;
  size_t at = 0;
  bool ok = true;

  int64_t number() {
    int64_t value = 0;
    take(&value, sizeof value);
    return value;
  }
  /// A number of [first, last].
  int64_t number(int64_t first, int64_t last) {
    const int64_t value = number();
    ok = ok && value >= first && value <= last;
    return value;
  }
  std::string text(uint16_t max_nbytes) {
    uint16_t length = 0;
    take(&length, sizeof length);
    if (!ok || length > max_nbytes || bytes.size() - at < length) {
      ok = false;
      return "";
    }
    at += length;
    return printable(std::string_view(bytes).substr(at - length, length), max_nbytes);
  }
  [[nodiscard]] bool complete() const {
    return ok && at == bytes.size();
  }

 private:
  void take(void* into, size_t length) {
    if (!ok || bytes.size() - at < length) {
      ok = false;
      return;
    }
    std::memcpy(into, bytes.data() + at, length);
    at += length;
  }
};

// A value with a space in it is quoted, so that the line stays splittable.
void addPair(std::string& out, const char* key, const std::string& value) {
  if (value.empty()) {
    return;
  }
  if (!out.empty()) {
    out += ' ';
  }
  out += key;
  out += '=';
  if (value.find_first_of(" \t\n\"") == std::string::npos) {
    out += value;
    return;
  }
  out += '"';
  for (const char c : value) {
    out += c == '"' ? '\'' : (c == '\n' || c == '\t' ? ' ' : c);
  }
  out += '"';
}

void addPair(std::string& out, const char* key, int64_t value) {
  if (value >= 0) {
    addPair(out, key, std::to_string(value));
  }
}

} // namespace

const char* errorCodeName(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::Ok:
      return "OK";
    case ErrorCode::InvalidArgument:
      return "INVALID_ARGUMENT";
    case ErrorCode::Unsupported:
      return "UNSUPPORTED";
    case ErrorCode::RendezvousTimeout:
      return "RENDEZVOUS_TIMEOUT";
    case ErrorCode::StoreLost:
      return "STORE_LOST";
    case ErrorCode::ConnectFailed:
      return "CONNECT_FAILED";
    case ErrorCode::DuplicateRank:
      return "DUPLICATE_RANK";
    case ErrorCode::ConfigMismatch:
      return "CONFIG_MISMATCH";
    case ErrorCode::VersionMismatch:
      return "VERSION_MISMATCH";
    case ErrorCode::NoInterface:
      return "NO_INTERFACE";
    case ErrorCode::PortsExhausted:
      return "PORTS_EXHAUSTED";
    case ErrorCode::CollectiveMismatch:
      return "COLLECTIVE_MISMATCH";
    case ErrorCode::Timeout:
      return "TIMEOUT";
    case ErrorCode::PeerDead:
      return "PEER_DEAD";
    case ErrorCode::PeerUnresponsive:
      return "PEER_UNRESPONSIVE";
    case ErrorCode::PeerLeft:
      return "PEER_LEFT";
    case ErrorCode::ConnectionReset:
      return "CONN_RESET";
    case ErrorCode::ProtocolViolation:
      return "PROTOCOL_VIOLATION";
    case ErrorCode::DataCorrupt:
      return "DATA_CORRUPT";
    case ErrorCode::QuorumLost:
      return "QUORUM_LOST";
    case ErrorCode::LeftBehind:
      return "LEFT_BEHIND";
    case ErrorCode::JoinRefused:
      return "JOIN_REFUSED";
    case ErrorCode::Aborted:
      return "ABORTED";
    case ErrorCode::ShutDown:
      return "SHUT_DOWN";
    case ErrorCode::Forked:
      return "FORKED";
    case ErrorCode::OutOfMemory:
      return "OUT_OF_MEMORY";
    case ErrorCode::TooManyFiles:
      return "TOO_MANY_FILES";
    case ErrorCode::SystemError:
      return "SYSTEM_ERROR";
    case ErrorCode::Internal:
      return "INTERNAL";
    case ErrorCode::NoSharedMemory:
      return "SHM_NO_SPACE";
  }
  return kUnknownCode;
}

std::string ErrorRecord::line() const {
  std::string out;
  addPair(out, "code", errorCodeName(code));
  addPair(out, "peer", peer);
  addPair(out, "peer_host", peer_host);
  addPair(out, "rank", rank);
  addPair(out, "host", host);
  if (!group_ranks.empty()) { // else it is the default group
    addPair(out, "group", group);
    addPair(out, "group_ranks", group_ranks);
  }
  if (epoch > 0) {
    addPair(out, "epoch", epoch);
  }
  addPair(out, "op", op);
  addPair(out, "seq", sequence);
  addPair(out, "dtype", dtype);
  addPair(out, "numel", numel);
  if (bytes_total > 0) {
    addPair(out, "bytes", std::to_string(bytes_done < 0 ? 0 : bytes_done) + "/" + std::to_string(bytes_total));
  }
  addPair(out, "phase", std::string(phase.text()));
  addPair(out, "cause", cause);
  if (elapsed_ms >= 0) {
    addPair(out, "elapsed", std::to_string(elapsed_ms) + "ms");
  }
  return out;
}

std::string ErrorRecord::text() const {
  std::string out = summary.empty() ? std::string(errorCodeName(code)) : summary;
  out += " [" + line() + "]";
  if (!hint.empty()) {
    out += " Try: " + hint;
  }
  return out;
}

std::string ErrorRecord::serialize() const {
  std::string out;
  putNumber(out, static_cast<int64_t>(code));
  for (const int64_t value :
       {int64_t{rank}, int64_t{peer}, epoch, sequence, numel, bytes_done, bytes_total, elapsed_ms}) {
    putNumber(out, value);
  }
  for (const TextField& field : kTexts) {
    putText(out, this->*field.text, field.max_nbytes);
  }
  putText(out, phase.text(), kMaxPhaseNbytes);
  return out;
}

std::optional<ErrorRecord> ErrorRecord::deserialize(const std::string& bytes, int size, const JobRanks& ranks) {
  Reader in{bytes};
  ErrorRecord record;
  record.code = static_cast<ErrorCode>(in.number(1, UINT16_MAX));
  for (int* rank : {&record.rank, &record.peer}) {
    *rank = static_cast<int>(in.number(-1, INT32_MAX));
    const int in_group = ranks.inGroup(*rank);
    in.ok = in.ok && (*rank == -1 || (in_group >= 0 && in_group < size));
  }
  for (int64_t* value :
       {&record.epoch, &record.sequence, &record.numel, &record.bytes_done, &record.bytes_total, &record.elapsed_ms}) {
    *value = in.number();
  }
  for (const TextField& field : kTexts) {
    record.*field.text = in.text(field.max_nbytes);
  }
  record.phase = ErrorPhase::find(in.text(kMaxPhaseNbytes)).value_or(ErrorPhase::Unknown);
  const bool known = std::string_view(errorCodeName(record.code)) != kUnknownCode;
  return in.complete() && known ? std::optional<ErrorRecord>(std::move(record)) : std::nullopt;
}

Error::Error(ErrorRecord record) : std::runtime_error(record.text()), record_(std::move(record)) {}

Error::Error(ErrorCode code, std::string summary, std::string hint)
    : Error([&] {
        ErrorRecord record;
        record.code = code;
        record.summary = std::move(summary);
        record.hint = std::move(hint);
        return record;
      }()) {}

ErrorRecord noMemoryLeft(const char* hint) noexcept {
  ErrorRecord record;
  record.code = ErrorCode::OutOfMemory;
  record.summary = "No memory left."; // as long as a string can be without memory of its own
  try {
    record.hint = hint;
  } catch (const std::bad_alloc&) {
  }
  return record;
}

ErrorRecord recordOf(const std::exception& exception, const char* failed) noexcept {
  try {
    if (const auto* error = dynamic_cast<const Error*>(&exception)) {
      return error->record();
    }
    ErrorRecord record;
    record.summary = std::string(failed) + ": " + exception.what();
    return record;
  } catch (const std::bad_alloc&) {
    return noMemoryLeft();
  }
}

std::string errnoText(int error_number) {
  // The GNU forms: strerrordesc_np and strerrorname_np return constants, so no buffer and no lock.
  const char* name = ::strerrorname_np(error_number);
  const char* text = ::strerrordesc_np(error_number);
  std::string out = name != nullptr ? name : "errno " + std::to_string(error_number);
  if (text != nullptr) {
    out += std::string(" (") + text + ")";
  }
  return out;
}

ErrorRecord systemError(ErrorCode code, const std::string& summary, int error_number) {
  ErrorRecord record;
  record.code = code;
  record.summary = summary;
  record.cause = errnoText(error_number);
  if (error_number == EMFILE || error_number == ENFILE) {
    record.code = ErrorCode::TooManyFiles;
    rlimit limit{};
    if (error_number == EMFILE && ::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
      record.summary += ": this process may open no more than " + std::to_string(limit.rlim_cur) + " files";
      record.hint = "raise the limit, ulimit -n " + std::to_string(limit.rlim_cur * 4);
    } else {
      record.summary += ": this host has no more open files left";
      record.hint = "raise fs.file-max, or find out who holds so many files open";
    }
  } else if (error_number == ENOMEM || error_number == ENOBUFS) {
    record.code = ErrorCode::OutOfMemory;
  }
  return record;
}

std::string localHostName() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) {
    return "unknown-host";
  }
  return name.data();
}

} // namespace pycomm
