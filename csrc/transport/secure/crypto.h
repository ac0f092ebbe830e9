#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

namespace pycomm {

// OpenSSL's functions that take a key. Texts are bytes. All of them throw Error(Unsupported) if there is no OpenSSL.

using Digest = std::array<unsigned char, 32>;

/// 32 bytes that nobody may see, on a page of their own that core dumps leave out. Wiped at the end. There is no way to print or copy it.
class Key {
 public:
  Key();
  ~Key();
  Key(Key&& other) noexcept;
  Key& operator=(Key&& other) noexcept;
  Key(const Key&) = delete;
  Key& operator=(const Key&) = delete;

  static constexpr size_t kNbytes = sizeof(Digest);
  [[nodiscard]] unsigned char* bytes() noexcept {
    return page_;
  }
  [[nodiscard]] const unsigned char* bytes() const noexcept {
    return page_;
  }
  [[nodiscard]] std::string_view view() const noexcept {
    return {reinterpret_cast<const char*>(page_), kNbytes};
  }

 private:
  unsigned char* page_ = nullptr; ///< a mapping of this object's own
};

[[nodiscard]] Digest sha256(std::string_view text);
/// RFC 2104.
[[nodiscard]] Digest hmacSha256(std::string_view key, std::string_view text);
/// RFC 5869, the first 32 bytes.
[[nodiscard]] Key hkdfSha256(std::string_view key, std::string_view salt, std::string_view info);

/// The time that this takes does not depend on where they differ. False if their lengths do.
[[nodiscard]] bool equalInConstantTime(std::string_view a, std::string_view b);

/// Overwrites `text`, which the compiler cannot leave out, and empties it.
void wipe(std::string& text) noexcept;

[[nodiscard]] std::string hexOf(std::string_view bytes);
[[nodiscard]] inline std::string_view viewOf(const Digest& digest) noexcept {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

} // namespace pycomm
