#include "transport/secure/openssl.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "transport/error_matchers.h"

namespace pycomm {
namespace {

using testing::errorOf;
using ::testing::HasSubstr;

TEST(OpenSsl, IsLoadedOnceAndIsVersion3) {
  const OpenSsl& first = openSsl();
  EXPECT_EQ(&first, &openSsl());
  EXPECT_GE(first.OpenSSL_version_num(), 0x30000000U);
}

TEST(OpenSsl, NamesWhatALibraryLacks) {
  void* const other = ::dlopen("libm.so.6", RTLD_NOW | RTLD_LOCAL); // stands for a library that is no OpenSSL
  ASSERT_NE(other, nullptr);
  const ErrorRecord record = errorOf([&] { (void)takeOpenSsl(other, "libother.so"); });
  EXPECT_EQ(record.code, ErrorCode::Unsupported);
  EXPECT_THAT(record.summary, HasSubstr("a secret needs OpenSSL 3, and libother.so lacks OpenSSL_version_num, "));
  EXPECT_THAT(record.summary, HasSubstr("SSL_CTX_set_psk_use_session_callback"));
  EXPECT_THAT(record.hint, HasSubstr("apt install libssl3"));
  ::dlclose(other);
}

} // namespace
} // namespace pycomm
