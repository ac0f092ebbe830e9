#pragma once

#include <cstddef>
#include <cstdint>

namespace pycomm {

/// Borrowed bytes. The maker of a view keeps the memory alive for as long as the view is used.
struct BufferView {
  std::byte* ptr = nullptr;
  size_t nbytes = 0;

  BufferView() = default;
  BufferView(std::byte* start, size_t length) : ptr(start), nbytes(length) {}
  BufferView(const BufferView&) = default;
  BufferView& operator=(const BufferView&) & = default; // not to a temporary: the assignment would be lost silently

  [[nodiscard]] BufferView slice(size_t offset, size_t length) const {
    return {ptr + offset, length};
  }
};

/// Borrowed read-only bytes.
struct ConstBufferView {
  const std::byte* ptr = nullptr;
  size_t nbytes = 0;

  ConstBufferView() = default;
  ConstBufferView(const std::byte* data, size_t length) : ptr(data), nbytes(length) {}
  ConstBufferView(const ConstBufferView&) = default;
  ConstBufferView& operator=(const ConstBufferView&) & = default;
  ConstBufferView(BufferView view) : ptr(view.ptr), nbytes(view.nbytes) {} // NOLINT: widening is the point

  [[nodiscard]] ConstBufferView slice(size_t offset, size_t length) const {
    return {ptr + offset, length};
  }
};

} // namespace pycomm
