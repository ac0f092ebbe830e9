#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/buffer_view.h"

namespace pycomm::testing {

using Bytes = std::vector<std::byte>;

inline ConstBufferView view(const Bytes& bytes) {
  return {bytes.data(), bytes.size()};
}

inline ConstBufferView view(const std::string& bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}

/// To write into as well.
template <typename T>
BufferView viewOf(std::vector<T>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(T)};
}

} // namespace pycomm::testing
