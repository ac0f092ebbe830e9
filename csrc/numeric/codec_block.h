#pragma once

#include <cstddef>

#include "base/codec.h"
#include "base/dtype.h"
#include "numeric/kernels.h"

// One block of a codec: up to kCodecBlock fp32 values and their encoded bytes (format: codec.h). The caller has set up
// the floating-point environment and checked the codec.

namespace pycomm::numeric {

/// Returns the number of finite values that became infinite: only possible if the largest value has the largest
/// exponent.
[[nodiscard]] size_t encodeBlock(const KernelSet& set, Codec codec, std::byte* dst, const float* src, size_t numel);

/// The same, and missing[i] = src[i] - the decoded value of dst, or 0 if that is not finite. `missing` may be `src`.
[[nodiscard]] size_t encodeBlockKeeping(
    const KernelSet& set,
    Codec codec,
    std::byte* dst,
    const float* src,
    float* missing,
    size_t numel);

void decodeBlock(const KernelSet& set, Codec codec, float* dst, const std::byte* src, size_t numel);

/// convert(), with this set's kernel if it has one.
void convertRow(const KernelSet& set, DType to, void* dst, DType from, const void* src, size_t numel, float factor);

} // namespace pycomm::numeric
