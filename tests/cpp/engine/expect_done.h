#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "engine/operation/operation.h"

namespace pycomm::testing {

/// Within 20 s by default, and without an error.
inline void expectDone(const std::shared_ptr<Operation>& operation, int within_ms = 20000) {
  ASSERT_TRUE(operation->wait(Deadline::after(within_ms))) << operation->label();
  const auto error = operation->error();
  ASSERT_FALSE(error) << error->text();
}

} // namespace pycomm::testing
