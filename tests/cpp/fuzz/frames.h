#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pycomm::fuzz {

/// A byte that says in what pieces they come, then the bytes of a connection, into the channel that cuts them.
[[nodiscard]] bool readFrames(const uint8_t* bytes, size_t nbytes);
[[nodiscard]] std::vector<uint8_t> framesSample();

/// What two peers and this rank do, an event a byte and what it needs, into the matching of a group of three.
[[nodiscard]] bool readMatching(const uint8_t* bytes, size_t nbytes);
[[nodiscard]] std::vector<uint8_t> matchingSample();

} // namespace pycomm::fuzz
