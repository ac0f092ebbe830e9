#pragma once

#include <new>
#include <system_error>

#include "base/error.h"
#include "c10d/python_errors.h"

namespace pycomm {

/// The record for a std::bad_alloc.
[[nodiscard]] inline ErrorRecord outOfMemory() noexcept {
  return noMemoryLeft("use a smaller batch, or fewer operations at once");
}

/// Runs the body of a function that torch calls; pycomm's errors leave it as Python exceptions. The caller does not hold the
/// interpreter's lock while the body blocks.
template <typename Body>
auto raising(const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& error) {
    throwToPython(error.record());
  } catch (const std::bad_alloc&) {
    throwToPython(outOfMemory());
  } catch (const std::system_error& error) { // a thread could not be started, or a lock not be taken
    ErrorRecord record;
    record.code = ErrorCode::SystemError;
    record.summary = "The system refused what this process needs.";
    record.cause = error.what();
    throwToPython(record);
  }
}

} // namespace pycomm
