#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/secure/secret.h"

namespace pycomm::fuzz {

/// The same in every run, so that inputs which hold its key id stay good.
[[nodiscard]] Secret fuzzSecret();

/// The bytes of a connection to the port of a process with a secret, over a scripted TLS engine, and what the link that comes out of it
/// does. Three bytes first: where the connection pauses, the engine's troubles and whether a plain Hello comes
/// first, what is done with the link.
[[nodiscard]] bool readEndpoint(const uint8_t* bytes, size_t nbytes);
[[nodiscard]] std::vector<uint8_t> endpointSample();
/// The bytes that a process with a secret gets from the port that it connects to. Four bytes first: the pieces, the pauses, the
/// engine's troubles, what is done with the link.
[[nodiscard]] bool readDial(const uint8_t* bytes, size_t nbytes);
[[nodiscard]] std::vector<uint8_t> dialSample();
/// A byte that says which, then the text of a secret file, an identity of TLS, or a sealed text.
[[nodiscard]] bool readSecret(const uint8_t* bytes, size_t nbytes);
[[nodiscard]] std::vector<uint8_t> secretSample();

} // namespace pycomm::fuzz
