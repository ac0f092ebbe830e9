#pragma once

#include <string>

#include "base/error.h"

namespace pycomm {

/// An error record for a failed system call. Running out of descriptors or memory becomes TooManyFiles or OutOfMemory
/// whatever `code` says: then the peer is not to blame.
[[nodiscard]] ErrorRecord systemError(ErrorCode code, const std::string& summary, int error_number);

} // namespace pycomm
