#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <string>

#include "base/dtype.h"
#include "base/error.h"
#include "base/reduce_op.h"
#include "cuda/c_api.h"
#include "cuda/device_runtime.h"

namespace pycomm::cuda {

/// The library's runtime, made at the first call.
[[nodiscard]] DeviceRuntime& theRuntime();

/// Fills in `error` and returns its code.
uint16_t tell(const ErrorRecord& record, PycommCudaError* error) noexcept;
[[nodiscard]] ErrorRecord recordOf(const PycommCudaError& error);

/// Throw Error(InvalidArgument) for a number that is none of pycomm's.
[[nodiscard]] DType dtypeOf(uint8_t number);
[[nodiscard]] ReduceOp opOf(uint8_t number);

template <class Body>
uint16_t guarded(PycommCudaError* error, const Body& body) noexcept {
  try {
    body();
    return 0;
  } catch (const Error& failure) {
    return tell(failure.record(), error);
  } catch (const std::bad_alloc&) {
    return error->code = static_cast<uint16_t>(ErrorCode::OutOfMemory);
  } catch (const std::exception&) {
    return error->code = static_cast<uint16_t>(ErrorCode::Internal);
  }
}

} // namespace pycomm::cuda
