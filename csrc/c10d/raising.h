#pragma once

#include "base/error.h"
#include "c10d/python_errors.h"

namespace pycomm {

/// Runs the body of an entry point of torch's; pycomm's errors leave it as Python's exceptions. The caller does not hold the
/// interpreter's lock while the body blocks.
template <typename Body>
auto raising(const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& error) {
    throwToPython(error.record());
  }
}

} // namespace pycomm
