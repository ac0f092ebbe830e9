#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pycomm::fuzz {

/// What reads bytes that a stranger, or a broken peer, may have written, and what is then done with them. One input is any bytes.
/// Nothing may be read out of bounds (AddressSanitizer looks), nothing but pycomm::Error may be thrown inside, and what was understood
/// must survive being written again. A broken promise is thrown as std::logic_error.
struct Target {
  const char* name;
  /// Returns true where the input, or some of it, was understood.
  bool (*read)(const uint8_t* bytes, size_t nbytes);
  /// A well-formed input, for mutations to begin with.
  std::vector<uint8_t> (*sample)();
};

/// Connections into the acceptor and replies to them; error records, rank records and other texts of the store, and a whole rendezvous;
/// frames of a connection, into the planes of a group, and into the matching of operations; messages and records of the agreement.
[[nodiscard]] const std::vector<Target>& targets();

} // namespace pycomm::fuzz
