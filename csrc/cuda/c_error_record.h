#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "cuda/c_api.h"

namespace pycomm {

/// Fills in `error` and returns its code. Here and not in a source file: both sides of the C interface use it.
inline uint16_t fillError(const ErrorRecord& record, PycommCudaError* error) noexcept {
  const auto put = [](auto& to, const std::string& text) {
    const size_t length = std::min(text.size(), sizeof(to) - 1);
    std::memcpy(to, text.data(), length);
    to[length] = '\0';
  };
  error->code = static_cast<uint16_t>(record.code);
  put(error->summary, record.summary);
  put(error->hint, record.hint);
  put(error->cause, record.cause);
  error->rank = record.rank;
  error->peer = record.peer;
  error->sequence = record.sequence;
  error->numel = record.numel;
  error->elapsed_ms = record.elapsed_ms;
  put(error->op, record.op);
  put(error->dtype, record.dtype);
  put(error->phase, record.phase);
  put(error->group, record.group);
  return error->code;
}

[[nodiscard]] inline ErrorRecord recordOf(const PycommCudaError& error) {
  ErrorRecord record;
  record.code = static_cast<ErrorCode>(error.code);
  record.summary = error.summary;
  record.hint = error.hint;
  record.cause = error.cause;
  record.rank = error.rank;
  record.peer = error.peer;
  record.sequence = error.sequence;
  record.numel = error.numel;
  record.elapsed_ms = error.elapsed_ms;
  record.op = error.op;
  record.dtype = error.dtype;
  record.phase = error.phase;
  record.group = error.group;
  return record;
}

} // namespace pycomm
