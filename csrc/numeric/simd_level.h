#pragma once

namespace pycomm {

/// The instruction set that the numeric layer uses. Decided once, from the processor's feature flags.
enum class SimdLevel { Scalar, Avx2, Avx512, Neon };

[[nodiscard]] SimdLevel simdLevel() noexcept;
[[nodiscard]] const char* simdLevelName(SimdLevel level) noexcept;

/// Tests only: lowers the level. A level above the processor's is ignored. Not thread-safe.
void forceSimdLevel(SimdLevel level) noexcept;

} // namespace pycomm
