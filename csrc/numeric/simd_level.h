#pragma once

namespace pycomm {

/// Which instruction set the numeric floor uses. Decided once, from what the processor reports.
enum class SimdLevel { Scalar, Avx2, Avx512, Neon };

[[nodiscard]] SimdLevel simdLevel() noexcept;
[[nodiscard]] const char* simdLevelName(SimdLevel level) noexcept;

/// Tests only: lower the level (a higher one than the processor has is ignored). Not thread-safe.
void forceSimdLevel(SimdLevel level) noexcept;

} // namespace pycomm
