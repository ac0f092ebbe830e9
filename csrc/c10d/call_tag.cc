#include "c10d/call_tag.h"

namespace pycomm {
namespace {
thread_local uint32_t t_tag = 0;
} // namespace

CallTag::CallTag(uint32_t tag) noexcept : outer_(t_tag) {
  t_tag = tag;
}

CallTag::~CallTag() {
  t_tag = outer_;
}

uint32_t CallTag::current() noexcept {
  return t_tag;
}

uint32_t CallTag::of(std::string_view text, uint32_t before) noexcept {
  uint32_t hash = before;
  for (const char c : text) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 16777619U;
  }
  hash = (hash ^ 0xffU) * 16777619U; // a text's end: {"ab", "c"} is not {"a", "bc"}
  return hash == 0 ? 1 : hash;
}

} // namespace pycomm
