#pragma once

#include <cstddef>
#include <cstdint>

namespace pycomm {

/// Random bytes of the kernel, good enough for keys. Throws Error(SystemError).
void fillRandom(void* into, size_t nbytes);

[[nodiscard]] inline uint64_t randomNumber() {
  uint64_t number = 0;
  fillRandom(&number, sizeof number);
  return number;
}

} // namespace pycomm
