#pragma once

#include <cstdint>
#include <string>

#include "base/unique_fd.h"

namespace pycomm {

// Messages between processes of one host over Unix sockets: see HostMates.

/// The first message, from the watched process to the watcher: its DeathWatch words (passed as a descriptor) and the index of the watcher's
/// word.
struct Greeting {
  static constexpr uint32_t kMagic = 0x61776370; // "pcwa"
  uint32_t magic = kMagic;
  uint32_t word = 0;
};

/// A watcher asks for the memory of a group, or (kReport) for what this process is doing, and the answer.
struct Ask {
  static constexpr uint32_t kMagic = 0x61736370; // "pcsa"
  static constexpr uint32_t kReport = 0x72736370; // "pcsr": the answer's memory holds the report, and `key` its length
  uint32_t magic = kMagic;
  uint32_t there = 0; ///< of the answer: 1 if the memory comes with it
  uint64_t key = 0;
};
static_assert(sizeof(Ask) != sizeof(Greeting), "their length tells them apart");

/// A connection to the process of that name, if it runs as the same user; else none, and errno says why.
[[nodiscard]] UniqueFd connectToMate(const std::string& name);

} // namespace pycomm
