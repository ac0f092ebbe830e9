#pragma once

#include <cstddef>

#include "base/codec.h"
#include "base/dtype.h"

namespace pycomm {

// The interpreter's codecs: plain loops in double, written independently of numeric/codec so that each can reveal the
// other's mistakes. numeric/codec.h describes the formats. `dtype` is Float32 or Float64.

void encodeElements(Codec codec, std::byte* dst, DType dtype, const std::byte* src, size_t numel);
void decodeElements(Codec codec, DType dtype, std::byte* dst, const std::byte* src, size_t numel);

} // namespace pycomm
