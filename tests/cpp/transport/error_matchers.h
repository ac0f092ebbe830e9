#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <optional>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "base/error.h"
#include "within.h"

namespace pycomm::testing {

inline const AbortToken kNoAbort;

/// The error that `body` throws; a test failure if it throws none.
inline ErrorRecord errorOf(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.record();
  }
  ADD_FAILURE() << "no error was thrown";
  ErrorRecord none;
  none.code = ErrorCode::Ok;
  return none;
}

} // namespace pycomm::testing
