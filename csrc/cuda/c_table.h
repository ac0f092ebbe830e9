#pragma once

#include <memory>

#include "cuda/c_api.h"
#include "cuda/device_runtime.h"

namespace pycomm::cuda {

/// What pycomm_cuda_table() gives, over any runtime. `makeRuntime` is called once, by the first function that needs it.
[[nodiscard]] const PycommCudaTable* makeTable(std::unique_ptr<DeviceRuntime> (*makeRuntime)());

} // namespace pycomm::cuda
