#pragma once

#include "cuda/c_api.h"

namespace pycomm::cuda {

/// Fills in the table's nccl_ functions.
void addNccl(PycommCudaTable& table);

} // namespace pycomm::cuda
