#pragma once

#include <cstddef>
#include <cstdint>

#include "base/codec.h"
#include "base/dtype.h"

namespace pycomm {

// Wire codecs: floating-point values to fewer bytes and back. A value v comes back as d(v); m is the largest finite magnitude of
// its block of kCodecBlock values.
//
//   codec  a block's bytes                              |d(v) - v| at most, for finite v
//   bf16   values                                       2^-8 |v|, or 2^-134
//   fp16   exponent b (2), values: v * 2^(127-b)        2^-11 |v|, or 2^-39 m, or 2^-150
//   int8   scale s as bf16 (2), v / s                   s / 2 + 2^-24 |v|, where m / 126 <= s <= m / 125, or m / 126 + 2^-133
//
// The largest of the alternatives holds: the first is the format's own rounding, the second its smallest step, the
// third fp32's. b puts m in the format's range for any m: a gradient of 1e-6 keeps as many bits as one of 1. s is m /
// 126, rounded up to 8 bits, so that a code times s is exact. Rounding is to nearest even throughout.
//
// NaN stays NaN and an infinity keeps its sign, in every codec; neither changes the other values of its block. A finite
// value becomes infinite only if rounding takes it beyond fp32's largest number, or if it is a double beyond that.
// Encoders return the number of such values. -0 becomes +0 in int8.
//
// from, to: Float32, Float64, Float16 or BFloat16; anything else, and Codec::None, throw Error(Unsupported). Doubles go
// through fp32. Any thread, any alignment; buffers do not overlap. SIMD paths give the same bits as the scalar ones,
// independent of the thread's floating-point settings.

/// dst: encodedNbytes(codec, numel) bytes. Returns the number of finite values that became infinite.
[[nodiscard]] size_t encode(Codec codec, void* dst, DType from, const void* src, size_t numel);

/// The same from fp32, and error[i] = src[i] - d(src[i]), which error feedback adds to the next src; error[i] is 0 if
/// either is not finite. `error` may be `src`.
[[nodiscard]] size_t encodeWithError(Codec codec, void* dst, const float* src, float* error, size_t numel);

/// Error feedback in the same pass: encodes src[i] + error[i]; error[i] becomes the encoding error of that sum.
[[nodiscard]] size_t encodeWithFeedback(Codec codec, void* dst, const float* src, float* error, size_t numel);

void decode(Codec codec, DType to, void* dst, const void* src, size_t numel);

/// The reduction by the rank that owns a part: decodes all sources, adds them in fp32 from first to last (lower rank
/// first), divides once and encodes once. dst may be one of the sources. Returns the number of sums of finite values
/// that became infinite, by the sum or by its encoding.
[[nodiscard]] size_t sumEncoded(
    Codec codec,
    void* dst,
    const void* const* sources,
    size_t source_count,
    size_t numel,
    int64_t divisor = 1);

/// The same, and error[i] += the encoding error of the sum, in the sum's own size; 0 if that is not finite.
[[nodiscard]] size_t sumEncodedWithError(
    Codec codec,
    void* dst,
    const void* const* sources,
    size_t source_count,
    float* error,
    size_t numel);

/// The same, but writes the sum as `to` values instead of encoding it.
[[nodiscard]] size_t sumDecoded(
    Codec codec,
    DType to,
    void* dst,
    const void* const* sources,
    size_t source_count,
    size_t numel,
    int64_t divisor = 1);

} // namespace pycomm
