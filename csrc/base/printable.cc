#include "base/printable.h"

namespace pycomm {
namespace {

unsigned byteAt(std::string_view text, size_t at) noexcept {
  return at < text.size() ? static_cast<unsigned char>(text[at]) : 0U;
}

// For the character of `length` bytes at `at`.
bool breaksALine(std::string_view text, size_t at, size_t length) noexcept {
  const unsigned first = byteAt(text, at);
  const unsigned second = byteAt(text, at + 1);
  const unsigned third = byteAt(text, at + 2);
  if (length == 1) {
    return first < 0x20U || first == 0x7fU;
  }
  if (length == 2) {
    return first == 0xc2U && second < 0xa0U; // U+0080 to U+009F: NEL, and CSI as one character
  }
  if (length != 3 || first != 0xe2U) {
    return false;
  }
  // U+200E, U+200F, U+2028 to U+202E and U+2066 to U+2069: separators of lines, and directions of writing.
  const bool general = second == 0x80U && (third == 0x8eU || third == 0x8fU || (third >= 0xa8U && third <= 0xaeU));
  return general || (second == 0x81U && third >= 0xa6U && third <= 0xa9U);
}

} // namespace

size_t utf8Length(std::string_view text, size_t at) noexcept {
  const auto byte = [&](size_t i) { return byteAt(text, at + i); };
  const auto tail = [&](size_t i) { return (byte(i) & 0xc0U) == 0x80U; };
  const unsigned first = byte(0);
  if (first < 0x80U) {
    return at < text.size() ? 1 : 0;
  }
  if (first >= 0xc2U && first <= 0xdfU && tail(1)) {
    return 2;
  }
  const bool second = tail(1) && !(first == 0xe0U && byte(1) < 0xa0U) && !(first == 0xedU && byte(1) > 0x9fU) &&
      !(first == 0xf0U && byte(1) < 0x90U) && !(first == 0xf4U && byte(1) > 0x8fU);
  if (first >= 0xe0U && first <= 0xefU && second && tail(2)) {
    return 3;
  }
  return first >= 0xf0U && first <= 0xf4U && second && tail(2) && tail(3) ? 4 : 0;
}

std::string printable(std::string_view text, size_t max_nbytes) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8Length(text, at);
    if (out.size() + (length == 0 ? 1 : length) > max_nbytes) {
      break;
    }
    if (length == 0) {
      out += '?';
    } else if (breaksALine(text, at, length)) {
      out += ' ';
    } else {
      out.append(text, at, length);
    }
    at += length == 0 ? 1 : length;
  }
  return out;
}

} // namespace pycomm
