#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pycomm {

/// The length in bytes of the valid UTF-8 character that begins at `at`, or 0 if none does. (Unicode 15, table 3-7.)
[[nodiscard]] size_t utf8Length(std::string_view text, size_t at) noexcept;

/// Makes another process's text safe to print: one line of valid UTF-8, of at most `max_nbytes`, without control
/// characters, terminal escapes and marks that reverse the direction of writing. A refused character becomes a space,
/// and a byte that is not UTF-8 becomes '?'.
[[nodiscard]] std::string printable(std::string_view text, size_t max_nbytes);

} // namespace pycomm
