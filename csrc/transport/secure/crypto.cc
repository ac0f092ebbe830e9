#include "transport/secure/crypto.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "transport/secure/openssl.h"

namespace pycomm {
namespace {

size_t keyPageNbytes() {
  static const auto nbytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return nbytes;
}

const unsigned char* bytesOf(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

[[noreturn]] void refused(const char* what) {
  throw Error(ErrorCode::Internal, std::string("OpenSSL refused to compute ") + what);
}

} // namespace

Key::Key() {
  void* const page = ::mmap(nullptr, keyPageNbytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    throw Error(systemError(ErrorCode::OutOfMemory, "there is no memory for a key", errno));
  }
  (void)::madvise(page, keyPageNbytes(), MADV_DONTDUMP);
  page_ = static_cast<unsigned char*>(page);
}

Key::~Key() {
  if (page_ != nullptr) {
    ::explicit_bzero(page_, kNbytes);
    (void)::munmap(page_, keyPageNbytes());
  }
}

Key::Key(Key&& other) noexcept : page_(std::exchange(other.page_, nullptr)) {}

Key& Key::operator=(Key&& other) noexcept {
  std::swap(page_, other.page_);
  return *this;
}

Digest sha256(std::string_view text) {
  const OpenSsl& ssl = openSsl();
  Digest digest{};
  unsigned length = 0;
  if (ssl.EVP_Digest(text.data(), text.size(), digest.data(), &length, ssl.EVP_sha256(), nullptr) != 1 ||
      length != digest.size()) {
    refused("SHA-256");
  }
  return digest;
}

Digest hmacSha256(std::string_view key, std::string_view text) {
  const OpenSsl& ssl = openSsl();
  Digest digest{};
  unsigned length = 0;
  // A null pointer would mean "the key of the last call".
  const void* const key_bytes = key.empty() ? "" : static_cast<const void*>(key.data());
  if (ssl.HMAC(
          ssl.EVP_sha256(),
          key_bytes,
          static_cast<int>(key.size()),
          bytesOf(text),
          text.size(),
          digest.data(),
          &length) == nullptr ||
      length != digest.size()) {
    refused("HMAC-SHA-256");
  }
  return digest;
}

Key hkdfSha256(std::string_view key, std::string_view salt, std::string_view info) {
  const Digest zeros{};
  Digest extracted = hmacSha256(salt.empty() ? viewOf(zeros) : salt, key);
  std::string block(info);
  block += '\x01';
  Digest expanded = hmacSha256(viewOf(extracted), block);
  Key out;
  std::memcpy(out.bytes(), expanded.data(), Key::kNbytes);
  ::explicit_bzero(extracted.data(), extracted.size());
  ::explicit_bzero(expanded.data(), expanded.size());
  return out;
}

bool equalInConstantTime(std::string_view a, std::string_view b) {
  return a.size() == b.size() && openSsl().CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

void wipe(std::string& text) noexcept {
  ::explicit_bzero(text.data(), text.size());
  text.clear();
}

std::string hexOf(std::string_view bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string out;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    out += kDigits[byte >> 4];
    out += kDigits[byte & 15];
  }
  return out;
}

} // namespace pycomm
