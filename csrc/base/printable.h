#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pycomm {

/// How many bytes of valid UTF-8 begin at `at`: 0 if none do. (Unicode 15, table 3-7.)
[[nodiscard]] size_t utf8Length(std::string_view text, size_t at) noexcept;

/// Text that another process wrote, fit to be printed: one line of valid UTF-8 without control characters, terminal escapes and marks
/// that reverse the direction of writing, of at most `max_nbytes`. A refused character becomes a space, a byte that is no UTF-8 a '?'.
[[nodiscard]] std::string printable(std::string_view text, size_t max_nbytes);

} // namespace pycomm
