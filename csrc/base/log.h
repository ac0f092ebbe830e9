#pragma once

#include <string>

namespace pycomm {

enum class LogLevel : int { Trace = 0, Info = 1, Warn = 2, Off = 3 };

/// Receives one line without a newline. Any thread calls it, data loops included: it must not block or throw.
using LogSink = void (*)(LogLevel level, const char* line);

/// The library itself never prints: the embedding program sets the sink. Default: none.
void setLogSink(LogSink sink, LogLevel minimum) noexcept;

[[nodiscard]] bool logEnabled(LogLevel level) noexcept;
void log(LogLevel level, const std::string& line) noexcept;

} // namespace pycomm
