#include "transport/secure/crypto.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>

namespace pycomm {
namespace {

std::string repeated(unsigned char byte, size_t count) {
  return std::string(count, static_cast<char>(byte));
}

std::string counting(unsigned char first, unsigned char last) {
  std::string out;
  for (int byte = first; byte <= last; ++byte) {
    out += static_cast<char>(byte);
  }
  return out;
}

// FIPS 180-2, appendix B.
TEST(Crypto, Sha256OfTheStandardsExamples) {
  EXPECT_EQ(hexOf(viewOf(sha256(""))), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hexOf(viewOf(sha256("abc"))), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(
      hexOf(viewOf(sha256(repeated('a', 1000000)))),
      "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Crypto, HmacOfRfc4231) {
  const auto mac = [](const std::string& key, const std::string& text) { return hexOf(viewOf(hmacSha256(key, text))); };
  EXPECT_EQ(mac(repeated(0x0b, 20), "Hi There"), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(
      mac("Jefe", "what do ya want for nothing?"), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(
      mac(repeated(0xaa, 20), repeated(0xdd, 50)), "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(
      mac(counting(1, 25), repeated(0xcd, 50)), "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(
      mac(repeated(0xaa, 131), "Test Using Larger Than Block-Size Key - Hash Key First"),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(
      mac(repeated(0xaa, 131),
          "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
          "hashed before being used by the HMAC algorithm."),
      "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(Crypto, HkdfOfRfc5869) {
  EXPECT_EQ(
      hexOf(hkdfSha256(repeated(0x0b, 22), counting(0, 12), counting(0xf0, 0xf9)).view()),
      "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf");
  EXPECT_EQ(
      hexOf(hkdfSha256(counting(0, 0x4f), counting(0x60, 0xaf), counting(0xb0, 0xff)).view()),
      "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c");
  EXPECT_EQ(
      hexOf(hkdfSha256(repeated(0x0b, 22), "", "").view()),
      "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d");
}

TEST(Crypto, ComparesAllBytes) {
  const std::string text = counting(0, 31);
  EXPECT_TRUE(equalInConstantTime(text, counting(0, 31)));
  EXPECT_TRUE(equalInConstantTime("", ""));
  EXPECT_FALSE(equalInConstantTime(text, text.substr(0, 31)));
  for (size_t i = 0; i < text.size(); ++i) {
    std::string other = text;
    other[i] = static_cast<char>(other[i] ^ 0x80);
    EXPECT_FALSE(equalInConstantTime(text, other)) << i;
  }
}

TEST(Key, MovesWithoutACopyAndIsGivenBack) {
  Key key = hkdfSha256("secret", "", "test");
  const std::string bytes(key.view());
  const unsigned char* const where = key.bytes();
  Key moved = std::move(key);
  EXPECT_EQ(moved.bytes(), where);
  EXPECT_EQ(moved.view(), bytes);
  moved = hkdfSha256("other", "", "test");
  EXPECT_NE(moved.view(), bytes);
}

} // namespace
} // namespace pycomm
