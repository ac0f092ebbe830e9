#pragma once

#include <cstddef>

#include "base/codec.h"
#include "base/dtype.h"

namespace pycomm {

// The interpreter's codecs: plain loops in double, written apart from numeric/codec so that one can find the other's mistakes. The
// formats are described there. `dtype` is Float32 or Float64.

void encodeElements(Codec codec, std::byte* dst, DType dtype, const std::byte* src, size_t numel);
void decodeElements(Codec codec, DType dtype, std::byte* dst, const std::byte* src, size_t numel);

} // namespace pycomm
