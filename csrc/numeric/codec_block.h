#pragma once

#include <cstddef>

#include "base/codec.h"
#include "base/dtype.h"
#include "numeric/kernels.h"

// One block of a codec: up to kCodecBlock fp32 values and the bytes they travel as. codec.h says what the bytes are. The caller has
// set up the floating-point environment and knows that the codec is one.

namespace pycomm::numeric {

/// Returns how many finite values became infinite: only possible where the largest has the largest exponent.
[[nodiscard]] size_t encodeBlock(const KernelSet& set, Codec codec, std::byte* dst, const float* src, size_t numel);

/// And missing[i] = src[i] - what dst gives for it, 0 where that is not finite. `missing` may be `src`.
[[nodiscard]] size_t encodeBlockKeeping(
    const KernelSet& set,
    Codec codec,
    std::byte* dst,
    const float* src,
    float* missing,
    size_t numel);

void decodeBlock(const KernelSet& set, Codec codec, float* dst, const std::byte* src, size_t numel);

/// convert(), by this set where it can.
void convertRow(const KernelSet& set, DType to, void* dst, DType from, const void* src, size_t numel, float factor);

} // namespace pycomm::numeric
