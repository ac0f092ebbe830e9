#pragma once

#include <pybind11/pybind11.h>

#include "base/error.h"

namespace pycomm {

/// A record as Python sees it: the known fields by name. Needs the interpreter's lock.
[[nodiscard]] inline pybind11::dict recordDict(const ErrorRecord& record) {
  pybind11::dict dict;
  dict["code"] = errorCodeName(record.code);
  const auto text = [&](const char* key, const std::string& value) {
    if (!value.empty()) {
      dict[key] = value;
    }
  };
  const auto number = [&](const char* key, int64_t value) {
    if (value >= 0) {
      dict[key] = value;
    }
  };
  text("summary", record.summary);
  text("hint", record.hint);
  text("cause", record.cause);
  number("rank", record.rank);
  text("host", record.host);
  number("peer", record.peer);
  text("peer_host", record.peer_host);
  text("group", record.group);
  text("group_ranks", record.group_ranks);
  number("epoch", record.epoch);
  text("op", record.op);
  number("sequence", record.sequence);
  text("dtype", record.dtype);
  number("numel", record.numel);
  number("bytes_done", record.bytes_done);
  number("bytes_total", record.bytes_total);
  text("phase", record.phase.text());
  number("elapsed_ms", record.elapsed_ms);
  return dict;
}

} // namespace pycomm
