#pragma once

#include <string>

namespace pycomm {

/// A rank that has not entered an operation, and what it entered last, in words.
struct NotEntered {
  int peer;
  std::string last;
};

} // namespace pycomm
