#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "engine/operation/descriptor.h"
#include "transport/frame_header.h"

namespace pycomm::sim {

/// A hash of values in the order in which they are added. Two builds of the engine that behave alike give equal digests; see
/// docs/evidence/simulator.md.
class Digest {
 public:
  void addNumber(uint64_t number) noexcept;
  /// The bytes alone: a stream gives the same digest however it is cut.
  void addBytes(const std::byte* bytes, size_t nbytes) noexcept;
  /// With its length.
  void addText(const std::string& text) noexcept;
  /// All fields, as for the next two.
  void add(const FrameHeader& header) noexcept;
  void add(const Descriptor& descriptor) noexcept;
  void add(const ErrorRecord& error) noexcept;

  [[nodiscard]] uint64_t value() const noexcept {
    return value_;
  }

 private:
  uint64_t value_ = 0;
};

} // namespace pycomm::sim
