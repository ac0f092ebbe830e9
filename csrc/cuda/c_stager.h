#pragma once

#include "cuda/c_api.h"

namespace pycomm::cuda {

/// Fills in the table's stager_ functions.
void addStager(PycommCudaTable& table);

} // namespace pycomm::cuda
