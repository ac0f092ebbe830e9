#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace pycomm {

/// The encoding of floating-point values on the wire, if they travel in fewer bytes than they have in memory. Part of
/// the wire format: never reuse a number. Formats and errors: numeric/codec.h.
enum class Codec : uint8_t {
  None = 0,
  BFloat16 = 1,
  Float16 = 2,
  Int8 = 3,
};

/// "fp32" for None, "bf16", "fp16", "int8".
[[nodiscard]] const char* codecName(Codec codec) noexcept;
/// The reverse; nullopt for another name.
[[nodiscard]] std::optional<Codec> codecNamed(const std::string& name) noexcept;
[[nodiscard]] bool isKnown(Codec codec) noexcept;

/// Values are encoded in blocks of this many, counted from the start of the encoding; the last block may be shorter. A
/// tensor that is cut at multiples of the block size has the same bytes however it is cut.
inline constexpr int64_t kCodecBlock = 256;

/// Bytes of `numel` encoded values. None counts as fp32.
[[nodiscard]] int64_t encodedNbytes(Codec codec, int64_t numel) noexcept;
/// The number of values in `nbytes` encoded bytes: the reverse of encodedNbytes.
[[nodiscard]] int64_t encodedNumel(Codec codec, int64_t nbytes) noexcept;

} // namespace pycomm
