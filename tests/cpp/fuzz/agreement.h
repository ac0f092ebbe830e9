#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pycomm::fuzz {

/// A byte that says who gets it and in which phase, then the bytes of a message, or of the record of a dead process.
[[nodiscard]] bool readAgreement(const uint8_t* bytes, size_t nbytes);
[[nodiscard]] std::vector<uint8_t> agreementSample();

} // namespace pycomm::fuzz
