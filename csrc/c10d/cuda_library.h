#pragma once

#include <string>

#include "cuda/c_api.h"

namespace pycomm {

/// libpycomm_cuda.so, loaded when the first CUDA tensor comes and never unloaded: by its full path, nothing else is looked
/// at. Throws Error(Unsupported) that says where it looked, what was there and what to do. Thread-safe.
[[nodiscard]] const PycommCudaTable& cudaLibrary(const std::string& path);

/// Throws the library's error.
[[noreturn]] void throwCuda(const PycommCudaError& error);

/// Calls a function of the table with an error to fill in; throws it. The function works on the calling thread's current device: a
/// c10::DeviceGuard sets and restores it, as torch's own calls do.
template <typename Function, typename... Arguments>
void callCuda(Function function, Arguments... arguments) {
  PycommCudaError error = {};
  if (function(arguments..., &error) != 0) {
    throwCuda(error);
  }
}

} // namespace pycomm
