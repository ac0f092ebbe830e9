#pragma once

#include <memory>
#include <string>

#include "device/cuda_table.h"
#include "device/device_runtime.h"

namespace pycomm::cuda {

/// CUDA through libpycomm_cuda.so, which the first call loads from its full path; it is never unloaded. Throws Error(Unsupported) that
/// names the path, the reason and what to do. Thread-safe.
[[nodiscard]] DeviceRuntime& cudaLibrary(const std::string& path);

/// The same over a table that is loaded already; `origin` names it in errors. Throws Error(Unsupported) if its version is another.
[[nodiscard]] std::unique_ptr<DeviceRuntime> runtimeOf(const CudaTable& table, const std::string& origin);

} // namespace pycomm::cuda
