#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <string>

#include "base/dtype.h"
#include "base/error.h"
#include "base/reduce_op.h"
#include "cuda/c_api.h"
#include "cuda/c_error_record.h"
#include "cuda/device_runtime.h"

namespace pycomm::cuda {

/// The library's runtime, made at the first call.
[[nodiscard]] DeviceRuntime& theRuntime();

/// Throw Error(InvalidArgument) for a number that is none of pycomm's.
[[nodiscard]] DType dtypeOf(uint8_t number);
[[nodiscard]] ReduceOp opOf(uint8_t number);

template <class Body>
uint16_t guarded(PycommCudaError* error, const Body& body) noexcept {
  try {
    body();
    return 0;
  } catch (const Error& failure) {
    return fillError(failure.record(), error);
  } catch (const std::exception& failure) {
    ErrorRecord record;
    record.code =
        dynamic_cast<const std::bad_alloc*>(&failure) != nullptr ? ErrorCode::OutOfMemory : ErrorCode::Internal;
    return fillError(record, error);
  }
}

} // namespace pycomm::cuda
