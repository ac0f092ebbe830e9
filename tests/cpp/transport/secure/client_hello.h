#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/secure/crypto.h"

namespace pycomm::testing {

/// The first message of a client (RFC 8446, 4.1.2), taken apart, so that a test changes it as a client with the key could: sealed()
/// makes a binder that fits.
struct ClientHello {
  static constexpr uint16_t kSupportedGroups = 10;
  static constexpr uint16_t kPreSharedKey = 41;
  static constexpr uint16_t kEarlyData = 42;
  static constexpr uint16_t kSupportedVersions = 43;
  static constexpr uint16_t kPskModes = 45;
  static constexpr uint16_t kKeyShare = 51;

  std::string version_and_random;
  std::string session; ///< with its length
  std::string ciphers; ///< without
  std::string compression; ///< with
  std::vector<std::pair<uint16_t, std::string>> extensions;

  /// Of the record that OpenSSL has made.
  static ClientHello parse(std::string_view record) {
    size_t at = 9; // the record's header and the message's
    const auto take = [&](size_t nbytes) {
      at += nbytes;
      return std::string(record.substr(at - nbytes, nbytes));
    };
    const auto number = [&](size_t nbytes) {
      size_t value = 0;
      for (const char c : take(nbytes)) {
        value = (value << 8) | static_cast<unsigned char>(c);
      }
      return value;
    };
    ClientHello hello;
    hello.version_and_random = take(34);
    hello.session = take(1 + static_cast<unsigned char>(record[at]));
    hello.ciphers = take(number(2));
    hello.compression = take(1 + static_cast<unsigned char>(record[at]));
    at += 2; // of all extensions together
    while (at < record.size()) {
      const size_t type = number(2);
      hello.extensions.emplace_back(static_cast<uint16_t>(type), take(number(2)));
    }
    return hello;
  }

  /// The content of an extension; a new one comes first. The pre-shared key's is the last one.
  std::string& operator[](uint16_t type) {
    for (auto& [present, content] : extensions) {
      if (present == type) {
        return content;
      }
    }
    return extensions.emplace(extensions.begin(), type, "")->second;
  }
  void remove(uint16_t type) {
    std::erase_if(extensions, [type](const auto& extension) { return extension.first == type; });
  }

  /// As a record, with the binder of this key.
  [[nodiscard]] std::string sealed(std::string_view key) const {
    std::string record = text();
    if (extensions.back().first == kPreSharedKey) {
      constexpr size_t kRecordHeader = 5;
      constexpr size_t kBinder = sizeof(Digest);
      constexpr size_t kBinders = 2 + 1 + kBinder;
      const Digest zeros{};
      const Digest early = hmacSha256(viewOf(zeros), key);
      const Digest binder_key = expand(early, "ext binder", viewOf(sha256("")));
      const std::string_view signed_part =
          std::string_view(record).substr(kRecordHeader, record.size() - kRecordHeader - kBinders);
      const Digest binder = hmacSha256(viewOf(expand(binder_key, "finished", "")), viewOf(sha256(signed_part)));
      record.replace(record.size() - kBinder, kBinder, viewOf(binder));
    }
    return record;
  }

 private:
  static std::string sized(size_t nbytes, const std::string& content) {
    std::string text;
    for (size_t i = nbytes; i-- > 0;) {
      text += static_cast<char>(content.size() >> (8 * i));
    }
    return text + content;
  }
  /// RFC 8446, 7.1.
  static Digest expand(const Digest& secret, const std::string& label, std::string_view context) {
    const std::string info = std::string("\0\x20", 2) + sized(1, "tls13 " + label) + sized(1, std::string(context));
    return hmacSha256(viewOf(secret), info + '\x01');
  }
  [[nodiscard]] std::string text() const {
    std::string all;
    for (const auto& [type, content] : extensions) {
      all += static_cast<char>(type >> 8);
      all += static_cast<char>(type);
      all += sized(2, content);
    }
    const std::string body = version_and_random + session + sized(2, ciphers) + compression + sized(2, all);
    return std::string("\x16\x03\x01", 3) + sized(2, '\x01' + sized(3, body));
  }
};

} // namespace pycomm::testing
