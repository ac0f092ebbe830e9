#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace pycomm::fuzz {

inline void promise(bool kept, const char* what) {
  if (!kept) {
    throw std::logic_error(what);
  }
}

inline std::vector<uint8_t> bytesOf(const std::string& text) {
  return {text.begin(), text.end()};
}

/// A copy that ends where the bytes end, so that AddressSanitizer sees a read past them.
inline std::unique_ptr<std::byte[]> exactly(const void* bytes, size_t nbytes) {
  auto copy = std::make_unique<std::byte[]>(nbytes);
  if (nbytes > 0) {
    std::memcpy(copy.get(), bytes, nbytes);
  }
  return copy;
}

/// The numbers that an input decides, zeros once it is used up.
class Choices {
 public:
  Choices(const uint8_t* bytes, size_t nbytes) : at_(bytes), left_(nbytes) {}

  [[nodiscard]] bool over() const noexcept {
    return left_ == 0;
  }
  uint8_t byte() {
    uint8_t value = 0;
    take(&value, 1);
    return value;
  }
  /// Fills what lies there as far as the input reaches.
  void take(void* into, size_t nbytes) {
    const size_t count = nbytes < left_ ? nbytes : left_;
    if (count > 0) {
      std::memcpy(into, at_, count);
    }
    at_ += count;
    left_ -= count;
  }

 private:
  const uint8_t* at_;
  size_t left_;
};

} // namespace pycomm::fuzz
