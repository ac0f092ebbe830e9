#pragma once

// Every difference between the torch minors that pycomm builds against (2.11 to 2.13) is settled here and nowhere else.
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 11
#error "pycomm needs torch 2.11 or later"
#endif

namespace pycomm {

/// What a PREMUL_SUM carries. 2.13 calls it PreMulSumSupplement, and keeps the name that 2.11 and 2.12 have.
using PreMulSumSupplement = c10d::NCCLPreMulSumSupplement;

} // namespace pycomm
