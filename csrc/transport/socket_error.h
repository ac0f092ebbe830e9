#pragma once

#include <string>

#include "base/error.h"

namespace pycomm {

/// An error record for a failed system call. If the process ran out of descriptors or memory, the code is TooManyFiles
/// or OutOfMemory instead of `code`: then the peer is not to blame.
[[nodiscard]] ErrorRecord systemError(ErrorCode code, const std::string& summary, int error_number);

} // namespace pycomm
