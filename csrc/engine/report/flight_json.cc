#include "engine/report/flight_json.h"

#include <cstdio>
#include <utility>
#include <vector>

#include "base/printable.h"

namespace pycomm {
namespace {

/// Puts "key":value pairs between braces.
class Object {
 public:
  void raw(const char* key, const std::string& value) {
    out_ += out_.size() == 1 ? "\"" : ",\"";
    out_ += key;
    out_ += "\":";
    out_ += value;
  }
  void text(const char* key, std::string_view value) {
    raw(key, jsonText(value));
  }
  void number(const char* key, int64_t value) {
    raw(key, std::to_string(value));
  }
  /// Left out where it is below zero, which means unknown.
  void known(const char* key, int64_t value) {
    if (value >= 0) {
      number(key, value);
    }
  }
  void known(const char* key, const std::string& value) {
    if (!value.empty()) {
      text(key, value);
    }
  }
  [[nodiscard]] std::string end() {
    return std::move(out_) + "}";
  }

 private:
  std::string out_ = "{";
};

template <typename T, typename ToText>
std::string list(const std::vector<T>& values, const char* between, const ToText& to_text) {
  std::string out = "[";
  for (const T& value : values) {
    if (out.size() > 1) {
      out += ',';
    }
    out += between;
    out += to_text(value);
  }
  return out + "]";
}

std::string jsonOf(const FlightLog::Entry& entry, const JobRanks& job, const WallClock& clock) {
  const Descriptor& descriptor = entry.descriptor;
  Object out;
  out.number("ticket", static_cast<int64_t>(entry.ticket));
  out.raw("id", "\"" + std::to_string(entry.id.id) + "\""); // 64 bits: more than a JSON number surely holds
  out.known("sequence", entry.id.sequence);
  out.text("op", collectiveName(descriptor.kind));
  out.text("state", operationStateName(entry.state));
  out.text("dtype", dtypeName(descriptor.dtype));
  out.number("numel", descriptor.numel);
  if (descriptor.reduce_op != ReduceOp::None) {
    out.text("reduce_op", reduceOpName(descriptor.reduce_op));
  }
  if (const std::string wire = descriptor.wireName(); !wire.empty()) {
    out.text("wire_dtype", wire);
  }
  out.text("algorithm", algorithmName(descriptor.algorithm));
  const bool message = descriptor.kind == Collective::Send || descriptor.kind == Collective::Recv;
  out.known(message ? "peer" : "root", job.of(descriptor.root));
  if (descriptor.tag != 0 || message) {
    out.number("tag", descriptor.tag);
  }
  if (descriptor.digest != 0) {
    out.number("splits", descriptor.digest);
  }
  const auto time = [&](const char* key, int64_t steady_ns) {
    if (steady_ns != 0) {
      out.number(key, clock.at(steady_ns));
    }
  };
  time("issued_ns", entry.issued_ns);
  time("started_ns", entry.started_ns);
  time("first_byte_ns", entry.first_byte_ns);
  time("ended_ns", entry.ended_ns);
  out.number("bytes_done", entry.bytes_done);
  out.number("bytes_total", entry.bytes_total);
  if (entry.state == OperationState::Failed) {
    out.text("code", errorCodeName(entry.code));
    out.known("blamed", entry.blamed);
  }
  out.number("thread", entry.thread);
  return out.end();
}

} // namespace

std::string jsonText(std::string_view text) {
  std::string out = "\"";
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8Length(text, at);
    const char c = text[at];
    if (length == 0) {
      out += "\\ufffd";
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20U) {
      char escaped[8];
      static_cast<void>(std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c)));
      out += escaped;
    } else {
      out.append(text, at, length);
    }
    at += length == 0 ? 1 : length;
  }
  return out + "\"";
}

std::string jsonOf(const ErrorRecord& record) {
  Object out;
  out.text("code", errorCodeName(record.code));
  out.known("summary", record.summary);
  out.known("hint", record.hint);
  out.known("cause", record.cause);
  out.known("rank", record.rank);
  out.known("host", record.host);
  out.known("peer", record.peer);
  out.known("peer_host", record.peer_host);
  out.known("group", record.group);
  out.known("group_ranks", record.group_ranks);
  out.known("epoch", record.epoch);
  out.known("op", record.op);
  out.known("sequence", record.sequence);
  out.known("dtype", record.dtype);
  out.known("numel", record.numel);
  out.known("bytes_done", record.bytes_done);
  out.known("bytes_total", record.bytes_total);
  out.known("phase", record.phase.text());
  out.known("elapsed_ms", record.elapsed_ms);
  return out.end();
}

std::string jsonOf(const FlightLog::Subject& subject, const FlightLog::Snapshot& log, const WallClock& clock) {
  Object out;
  out.text("name", subject.group);
  out.known("desc", log.title);
  out.number("rank", subject.rank);
  out.number("size", subject.size);
  out.raw("global_ranks", list(subject.job.numbers(), "", [](int rank) { return std::to_string(rank); }));
  out.raw("hosts", list(log.hosts, "", [](const std::string& host) { return jsonText(host); }));
  out.raw("run", "\"" + std::to_string(log.run) + "\"");
  out.number("slots", static_cast<int64_t>(subject.slots));
  out.raw("complete", log.complete ? "true" : "false");
  Object phases;
  for (size_t phase = 0; phase < kGroupPhases; ++phase) {
    if (log.phase_ns[phase] != 0) {
      phases.number(groupPhaseName(static_cast<GroupPhase>(phase)), clock.at(log.phase_ns[phase]));
    }
  }
  out.raw("phases_ns", phases.end());
  if (log.failure) {
    out.raw("failure", jsonOf(*log.failure));
  }
  // One line for each operation, and each line whole: pycomm/_native/flight_record.py reads it line by line.
  out.raw("operations", list(log.entries, "\n", [&](const FlightLog::Entry& entry) {
            return jsonOf(entry, subject.job, clock);
          }));
  return out.end();
}

} // namespace pycomm
