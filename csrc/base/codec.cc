#include "base/codec.h"

#include <initializer_list>

namespace pycomm {
namespace {

struct Layout {
  int64_t element_nbytes;
  int64_t block_header_nbytes;
};

Layout layoutOf(Codec codec) noexcept {
  switch (codec) {
    case Codec::None:
      return {4, 0};
    case Codec::BFloat16:
      return {2, 0};
    case Codec::Float16:
      return {2, 2};
    case Codec::Int8:
      return {1, 2};
  }
  return {4, 0}; // a value outside the enumeration, which callers have refused before
}

} // namespace

const char* codecName(Codec codec) noexcept {
  switch (codec) {
    case Codec::None:
      return "fp32";
    case Codec::BFloat16:
      return "bf16";
    case Codec::Float16:
      return "fp16";
    case Codec::Int8:
      return "int8";
  }
  return "unknown";
}

std::optional<Codec> codecNamed(const std::string& name) noexcept {
  for (const Codec codec : {Codec::None, Codec::BFloat16, Codec::Float16, Codec::Int8}) {
    if (name == codecName(codec)) {
      return codec;
    }
  }
  return std::nullopt;
}

bool isKnown(Codec codec) noexcept {
  return static_cast<uint8_t>(codec) <= static_cast<uint8_t>(Codec::Int8);
}

int64_t encodedNbytes(Codec codec, int64_t numel) noexcept {
  const Layout layout = layoutOf(codec);
  const int64_t blocks = numel / kCodecBlock + (numel % kCodecBlock == 0 ? 0 : 1);
  return numel * layout.element_nbytes + blocks * layout.block_header_nbytes;
}

int64_t encodedNumel(Codec codec, int64_t nbytes) noexcept {
  const Layout layout = layoutOf(codec);
  const int64_t block_nbytes = kCodecBlock * layout.element_nbytes + layout.block_header_nbytes;
  const int64_t rest = nbytes % block_nbytes;
  return nbytes / block_nbytes * kCodecBlock +
      (rest == 0 ? 0 : (rest - layout.block_header_nbytes) / layout.element_nbytes);
}

} // namespace pycomm
