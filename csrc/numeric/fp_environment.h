#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace pycomm::numeric {

/// Sets the IEEE defaults (round to nearest even, subnormals kept, no traps), and restores the caller's settings when
/// it is destroyed.
///
/// A thread may have other settings (torch.set_flush_denormal, a Fortran library built with -ffast-math), and callers
/// drive the data loop themselves. Without this class, two ranks that add the same numbers could get different bits.
class FpEnvironment {
 public:
  FpEnvironment() noexcept : saved_(read()) {
    if ((saved_ & kControl) != kDefault) {
      write(kDefault);
    }
  }
  ~FpEnvironment() {
    if ((saved_ & kControl) != kDefault) {
      write(saved_);
    }
  }
  FpEnvironment(const FpEnvironment&) = delete;
  FpEnvironment& operator=(const FpEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word kDefault = 0x1f80; // Intel SDM vol. 1, 10.2.3: all exceptions masked
  static constexpr Word kControl = 0xffc0; // without the sticky exception flags
  static Word read() noexcept {
    return _mm_getcsr();
  }
  static void write(Word value) noexcept {
    _mm_setcsr(value);
  }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kDefault = 0;
  static constexpr Word kControl = 0x07ff9f07; // Arm ARM, FPCR: AHP DN FZ RMode Stride FZ16 Len, traps, NEP AH FIZ
  static Word read() noexcept {
    Word value = 0;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Word value) noexcept {
    asm volatile("msr fpcr, %0" : : "r"(value) : "memory");
  }
#else
  using Word = uint32_t;
  static constexpr Word kDefault = 0;
  static constexpr Word kControl = 0;
  static Word read() noexcept {
    return 0;
  }
  static void write(Word /*value*/) noexcept {}
#endif

  const Word saved_;
};

} // namespace pycomm::numeric
