#pragma once

#include <memory>

#include "cuda/device_runtime.h"

namespace pycomm::cuda {

/// CUDA's own runtime, linked statically. With kernels.cu the only part of this folder that needs a toolkit to build.
[[nodiscard]] std::unique_ptr<DeviceRuntime> makeCudartRuntime();

} // namespace pycomm::cuda
