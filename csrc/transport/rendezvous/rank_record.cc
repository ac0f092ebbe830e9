#include "transport/rendezvous/rank_record.h"

#include <map>
#include <sstream>

#include "base/error.h"
#include "base/printable.h"
#include "transport/frame_header.h"

namespace pycomm {
namespace {

constexpr size_t kMaxConfigNbytes = 4096;
constexpr size_t kMaxHostNbytes = 255;
constexpr size_t kMaxSocketNameNbytes = 32;
constexpr size_t kMaxRemarkNbytes = 255;

std::optional<uint64_t> parseNumber(const std::string& text, uint64_t limit) {
  if (text.empty() || text.size() > 20 || text.find_first_not_of("0123456789") != std::string::npos) {
    return std::nullopt;
  }
  uint64_t value = 0;
  for (const char c : text) {
    const uint64_t digit = static_cast<uint64_t>(c - '0');
    if (value > (UINT64_MAX - digit) / 10) {
      return std::nullopt;
    }
    value = value * 10 + digit;
  }
  return value <= limit ? std::optional<uint64_t>(value) : std::nullopt;
}

[[noreturn]] void refuseRecord(int rank, const std::string& what) {
  throw Error(
      ErrorCode::ProtocolViolation,
      "the store holds a record of rank " + std::to_string(rank) + " that no pycomm wrote: " + what,
      "is the store shared with another program, or its key overwritten?");
}

// The words of `text` that `other` lacks.
std::string onlyIn(const std::string& text, const std::string& other) {
  std::istringstream in(text);
  std::string word;
  std::string out;
  const std::string padded = " " + other + " ";
  while (in >> word) {
    if (padded.find(" " + word + " ") == std::string::npos) {
      out += (out.empty() ? "" : " ") + word;
    }
  }
  return out;
}

Error mismatch(ErrorCode code, const RankRecord& theirs, const std::string& summary, const std::string& hint) {
  ErrorRecord record;
  record.code = code;
  record.summary = summary;
  record.hint = hint;
  record.peer = theirs.job_rank;
  record.peer_host = theirs.host;
  return Error(record);
}

} // namespace

std::string RankRecord::wireText() const {
  std::string out = "pycomm " + std::to_string(version) + "\n";
  const auto put = [&](const char* key, const std::string& value) { out += std::string(key) + "=" + value + "\n"; };
  put("rank", std::to_string(rank));
  put("size", std::to_string(size));
  put("host", printable(host, kMaxHostNbytes));
  put("identity", identity.wireText());
  put("process", process.wireText());
  put("route", route.wireText());
  put("digest", std::to_string(config_digest));
  put("nonce", std::to_string(nonce));
  put("run", std::to_string(run));
  if (!process_id.empty()) {
    put("process_id", process_id);
  }
  put("watch", printable(watch_name, kMaxSocketNameNbytes));
  put("unix", printable(unix_socket, kMaxSocketNameNbytes));
  put("remark", printable(remark, kMaxRemarkNbytes));
  put("config", printable(config_text, kMaxConfigNbytes));
  return out;
}

RankRecord RankRecord::fromWireText(const std::string& text, int rank, const JobRanks& job) {
  const auto refuse = [&](const std::string& what) { refuseRecord(job.of(rank), what); };
  if (text.size() > kMaxRecordNbytes) {
    refuse("it has " + std::to_string(text.size()) + " bytes");
  }
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  const std::string mark = "pycomm ";
  const auto version =
      line.compare(0, mark.size(), mark) == 0 ? parseNumber(line.substr(mark.size()), INT32_MAX) : std::nullopt;
  if (!version) {
    refuse("it does not begin with \"pycomm <version>\"");
  }
  std::map<std::string, std::string> fields;
  while (std::getline(lines, line)) {
    const size_t equals = line.find('=');
    if (equals != std::string::npos) {
      fields[line.substr(0, equals)] = line.substr(equals + 1);
    }
  }
  RankRecord record;
  record.version = static_cast<int>(*version);
  record.rank = rank;
  record.job_rank = job.of(rank);
  record.host = printable(fields["host"], kMaxHostNbytes);
  if (record.version != FrameHeader::kVersion) {
    return record;
  }
  const auto number = [&](const char* key, uint64_t limit) {
    const auto value = parseNumber(fields[key], limit);
    if (!value) {
      refuse(std::string(key) + " is missing or no number");
    }
    return *value;
  };
  record.size = static_cast<int>(number("size", INT32_MAX));
  record.config_digest = static_cast<uint32_t>(number("digest", UINT32_MAX));
  record.nonce = number("nonce", UINT64_MAX);
  record.run = number("run", UINT64_MAX);
  record.config_text = printable(fields["config"], kMaxConfigNbytes);
  record.watch_name = printable(fields["watch"], kMaxSocketNameNbytes);
  record.unix_socket = printable(fields["unix"], kMaxSocketNameNbytes);
  record.process_id = fields["process_id"];
  if (!record.process_id.empty() && !isProcessId(record.process_id)) {
    refuse("its process id cannot be read");
  }
  record.remark = printable(fields["remark"], kMaxRemarkNbytes);
  if (number("rank", INT32_MAX) != static_cast<uint64_t>(rank)) {
    refuse("it says rank " + fields["rank"]);
  }
  const auto identity = HostIdentity::fromWireText(fields["identity"]);
  const auto process = ProcessIdentity::fromWireText(fields["process"]);
  const auto route = SocketAddress::fromWireText(fields["route"]);
  if (!identity || !process || !route) {
    refuse("its identity, process or route cannot be read");
  }
  record.identity = *identity;
  record.process = *process;
  record.route = *route;
  return record;
}

std::string RankRecord::who() const {
  const std::string where = host.empty() ? "unknown host" : "host " + host;
  const std::string pid = process.pid > 0 ? ", pid " + std::to_string(process.pid) : "";
  return "rank " + std::to_string(job_rank) + " (" + where + pid + ")";
}

void checkCompatible(const RankRecord& mine, const RankRecord& theirs) {
  if (mine.version != theirs.version) {
    throw mismatch(
        ErrorCode::VersionMismatch,
        theirs,
        mine.who() + " speaks pycomm wire version " + std::to_string(mine.version) + " and " + theirs.who() +
            " version " + std::to_string(theirs.version),
        "install the same pycomm on all hosts");
  }
  if (mine.size != theirs.size) {
    throw mismatch(
        ErrorCode::ConfigMismatch,
        theirs,
        mine.who() + " was started with world size " + std::to_string(mine.size) + " and " + theirs.who() + " with " +
            std::to_string(theirs.size),
        "start all ranks with the same WORLD_SIZE, and two jobs on two ports");
  }
  if (mine.config_digest != theirs.config_digest) {
    const std::string here = onlyIn(mine.config_text, theirs.config_text);
    const std::string there = onlyIn(theirs.config_text, mine.config_text);
    const auto shown = [](const std::string& difference, const RankRecord& record) {
      return difference.empty() ? "options with digest " + std::to_string(record.config_digest) : difference;
    };
    throw mismatch(
        ErrorCode::ConfigMismatch,
        theirs,
        mine.who() + " has " + shown(here, mine) + " and " + theirs.who() + " has " + shown(there, theirs),
        "give all ranks the same pycomm options and PYCOMM_ variables");
  }
}

std::string joinTexts(const std::vector<std::string>& texts) {
  std::string out;
  for (const std::string& text : texts) {
    out += std::to_string(text.size()) + ":" + text + ",";
  }
  return out;
}

std::optional<std::vector<std::string>> splitTexts(const std::string& joined) {
  std::vector<std::string> texts;
  size_t at = 0;
  while (at < joined.size()) {
    const size_t colon = joined.find(':', at);
    if (colon == std::string::npos || colon - at > 5) {
      return std::nullopt;
    }
    const auto length = parseNumber(joined.substr(at, colon - at), kMaxRecordNbytes);
    if (!length || joined.size() - colon - 1 < *length + 1 || joined[colon + 1 + *length] != ',') {
      return std::nullopt;
    }
    texts.push_back(joined.substr(colon + 1, *length));
    at = colon + 1 + *length + 1;
  }
  return texts;
}

} // namespace pycomm
