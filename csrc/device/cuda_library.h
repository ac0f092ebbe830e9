#pragma once

#include <memory>
#include <string>

#include "device/cuda_table.h"
#include "device/device_runtime.h"

namespace pycomm::cuda {

/// CUDA through libpycomm_cuda.so, which is loaded at the first call and never unloaded: from its full path and from nowhere else.
/// Throws Error(Unsupported) that names the path, what was wrong there and what to do. Thread-safe.
[[nodiscard]] DeviceRuntime& cudaLibrary(const std::string& path);

/// The same over a table that is there already; `origin` names it in errors. Throws Error(Unsupported) if its version is another.
[[nodiscard]] std::unique_ptr<DeviceRuntime> runtimeOf(const CudaTable& table, const std::string& origin);

} // namespace pycomm::cuda
