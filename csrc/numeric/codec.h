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
//   fp8    exponent b (2), values: v * 2^(127-b), e4m3  2^-4 |v|, or 2^-17 m, or 2^-136
//   int8   scale s as bf16 (2), v / s                   s / 2 + 2^-24 |v|, where m / 126 <= s <= m / 125, or m / 126 + 2^-133
//
// The largest of the alternatives holds; the first is the format's own rounding, the second its smallest step, the third fp32's.
// b puts m in the format's range, whatever its size: a gradient of 1e-6 keeps as many bits as one of 1. s is m / 126, rounded up to
// 8 bits, so that a code times s is exact. Rounding is to nearest even throughout.
//
// NaN stays NaN and an infinity stays one of its sign, in every codec; neither changes the other values of its block. A finite
// value becomes infinite only where rounding takes it beyond fp32's largest number (or where it is a double beyond that):
// encoders count those and return how many there were. -0 becomes +0 in int8, and in fp8 blocks with a NaN or infinity.
//
// from, to: Float32, Float64, Float16 or BFloat16; anything else, and Codec::None, throw Error(Unsupported). Doubles go through
// fp32. Any thread, any alignment; buffers do not overlap. SIMD paths give the same bits as the scalar ones, whatever the thread's
// floating-point settings.

/// dst: encodedNbytes(codec, numel) bytes. Returns how many finite values became infinite.
[[nodiscard]] size_t encode(Codec codec, void* dst, DType from, const void* src, size_t numel);

/// The same from fp32, and error[i] = src[i] - d(src[i]), which error feedback adds to the next src; 0 where either is not
/// finite. `error` may be `src`.
[[nodiscard]] size_t encodeWithError(Codec codec, void* dst, const float* src, float* error, size_t numel);

/// Error feedback, in the same pass: what travels is src[i] + error[i], and error[i] becomes what that loses.
[[nodiscard]] size_t encodeWithFeedback(Codec codec, void* dst, const float* src, float* error, size_t numel);

void decode(Codec codec, DType to, void* dst, const void* src, size_t numel);

/// What an owner does: decodes all sources, adds them up from the first to the last in fp32 (so lower rank first), divides once,
/// and encodes once. dst may be one of the sources. Returns how many sums of finite values became
/// infinite, in the sum or by encoding it.
[[nodiscard]] size_t sumEncoded(
    Codec codec,
    void* dst,
    const void* const* sources,
    size_t source_count,
    size_t numel,
    int64_t divisor = 1);

/// The same, and error[i] += what encoding the sum loses of it, in the sum's own size; nothing where that is not finite.
[[nodiscard]] size_t sumEncodedWithError(
    Codec codec,
    void* dst,
    const void* const* sources,
    size_t source_count,
    float* error,
    size_t numel);

/// The same, without encoding the sum: `to` values.
[[nodiscard]] size_t sumDecoded(
    Codec codec,
    DType to,
    void* dst,
    const void* const* sources,
    size_t source_count,
    size_t numel,
    int64_t divisor = 1);

} // namespace pycomm
