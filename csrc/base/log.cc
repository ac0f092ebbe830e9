#include "base/log.h"

#include <atomic>

namespace pycomm {
namespace {
std::atomic<LogSink> g_sink{nullptr};
std::atomic<int> g_minimum{static_cast<int>(LogLevel::Off)};
} // namespace

void setLogSink(LogSink sink, LogLevel minimum) noexcept {
  g_minimum.store(static_cast<int>(sink == nullptr ? LogLevel::Off : minimum), std::memory_order_relaxed);
  g_sink.store(sink, std::memory_order_release);
}

bool logEnabled(LogLevel level) noexcept {
  return static_cast<int>(level) >= g_minimum.load(std::memory_order_relaxed);
}

void log(LogLevel level, const std::string& line) noexcept {
  if (!logEnabled(level)) {
    return;
  }
  if (const LogSink sink = g_sink.load(std::memory_order_acquire)) {
    sink(level, line.c_str());
  }
}

} // namespace pycomm
