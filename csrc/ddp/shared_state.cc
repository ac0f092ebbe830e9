#include "ddp/shared_state.h"

#include <string>
#include <vector>

#include "c10d/call_tag.h"

namespace pycomm {
namespace {

template <typename Value>
uint32_t hashOf(const std::vector<Value>& values) {
  return CallTag::of({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)});
}

uint32_t hashOf(const std::vector<bool>& values) {
  std::string text;
  for (const bool value : values) {
    text += value ? '1' : '0';
  }
  return CallTag::of(text);
}

uint32_t hashOf(int64_t value) {
  return hashOf(std::vector<int64_t>{value});
}

} // namespace

SharedValues::Parts SharedValues::parts() const {
  return {
      hashOf(exponents),
      hashOf(order),
      hashOf(int64_t{agreed}),
      hashOf(int64_t{ordered}),
      hashOf(std::vector<int64_t>{accumulated, passes}),
      hashOf(trained),
      hashOf(int64_t{knows_used})};
}

} // namespace pycomm
