#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <new>
#include <optional>
#include <string_view>
#include <system_error>

#include "base/error.h"
#include "c10d/process_end.h"
#include "c10d/python_errors.h"
#include "engine/report/failure_text.h"

namespace pycomm {

/// The record for a std::bad_alloc.
[[nodiscard]] inline ErrorRecord outOfMemory() noexcept {
  return noMemoryLeft("use a smaller batch, or fewer operations at once");
}

/// A record if this is torch's allocator without memory. It throws an exception of its own for devices only.
[[nodiscard]] inline std::optional<ErrorRecord> ifOutOfMemory(const std::exception& error) {
  const std::string_view text = error.what();
  if (dynamic_cast<const std::bad_alloc*>(&error) == nullptr &&
      dynamic_cast<const c10::OutOfMemoryError*>(&error) == nullptr &&
      text.find("can't allocate memory") == std::string_view::npos) {
    return std::nullopt;
  }
  ErrorRecord record = outOfMemory();
  record.cause = text.substr(0, std::min(text.find("frame #"), text.find('\n'))); // a stack of torch's follows
  return record;
}

/// In a catch block: recordOfThrown(), also of what torch throws.
[[nodiscard]] inline ErrorRecord recordOfThrownHere(const GroupIdentity& identity) {
  std::exception_ptr exception = std::current_exception();
  try {
    throw;
  } catch (const c10::Error& error) {
    if (const auto record = ifOutOfMemory(error)) {
      exception = std::make_exception_ptr(Error(*record));
    }
  } catch (...) { // recordOfThrown() knows it
  }
  return recordOfThrown(exception, identity);
}

/// Runs the body of a function that torch calls; pycomm's errors leave it as Python exceptions. The caller does not hold the
/// interpreter's lock while the body blocks.
template <typename Body>
auto raising(const Body& body) -> decltype(body()) {
  const StayWithin stay;
  try {
    return body();
  } catch (const Error& error) {
    throwToPython(error.record());
  } catch (const std::bad_alloc&) {
    throwToPython(outOfMemory());
  } catch (const c10::Error& error) {
    if (const auto record = ifOutOfMemory(error)) {
      throwToPython(*record);
    }
    throw;
  } catch (const std::system_error& error) { // a thread could not be started, or a lock not be taken
    ErrorRecord record;
    record.code = ErrorCode::SystemError;
    record.summary = "The system refused what this process needs.";
    record.cause = error.what();
    throwToPython(record);
  }
}

} // namespace pycomm
