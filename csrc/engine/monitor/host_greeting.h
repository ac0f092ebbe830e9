#pragma once

#include <cstdint>
#include <string>

#include "base/unique_fd.h"
#include "transport/memory/memory_key.h"

namespace pycomm {

// Messages between processes of one host over Unix sockets: see LocalPeers.

/// The first message, from the watched process to the watcher: its DeathWatch words (passed as a descriptor) and the index of the watcher's
/// word.
struct Greeting {
  static constexpr uint32_t kMagic = 0x61776370; // "pcwa"
  uint32_t magic = kMagic;
  uint32_t word = 0;
};

/// A watcher asks for the memory of a group, and the answer.
struct Ask {
  static constexpr uint32_t kMagic = 0x61736370; // "pcsa"
  uint32_t magic = kMagic;
  uint32_t there = 0; ///< of the answer: 1 if the memory comes with it
  MemoryKey key;
};

/// A process asks what this one is doing, and the answer. `pycomm status` of another version sends it, too: it does not change.
struct AskReport {
  static constexpr uint32_t kMagic = 0x72736370; // "pcsr"
  uint32_t magic = kMagic;
  uint32_t there = 0; ///< of the answer: 1 if memory that holds the report comes with it
  uint64_t nbytes = 0; ///< of the report
};
static_assert(
    sizeof(Greeting) < sizeof(AskReport) && sizeof(AskReport) < sizeof(Ask),
    "their lengths tell them apart, and each fits into the room for an Ask");

/// A connection to the process of that name, if it runs as the same user; else none, and errno says why.
[[nodiscard]] UniqueFd connectToLocalPeer(const std::string& name);

} // namespace pycomm
