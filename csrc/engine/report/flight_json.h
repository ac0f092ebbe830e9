#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "engine/operation/flight_log.h"

namespace pycomm {

/// Turns steady-clock readings into the wall clock's nanoseconds since 1970.
struct WallClock {
  int64_t steady_anchor_ns = 0;
  int64_t wall_anchor_ns = 0;
  [[nodiscard]] int64_t at(int64_t steady_ns) const noexcept {
    return wall_anchor_ns + (steady_ns - steady_anchor_ns);
  }
};

/// A JSON string with its quotes. Bytes that are not UTF-8 become U+FFFD: a host may be called anything, and the file must be readable.
[[nodiscard]] std::string jsonText(std::string_view text);

/// One group of a dump as a JSON object, one operation per line. `pycomm/_native/flight_record.py` reads it. Numbers that mean "none" are absent.
[[nodiscard]] std::string jsonOf(
    const FlightLog::Subject& subject,
    const FlightLog::Snapshot& log,
    const WallClock& clock);

/// The error contract's fields, those that are known.
[[nodiscard]] std::string jsonOf(const ErrorRecord& record);

} // namespace pycomm
