#include "c10d/process_engine.h"

#include <mutex>

namespace pycomm {
namespace {
std::mutex g_mutex; ///< guards g_engine
Engine* g_engine = nullptr;
} // namespace

Engine& processEngine() {
  const std::lock_guard<std::mutex> lock(g_mutex);
  if (g_engine == nullptr || !g_engine->belongsToThisProcess()) {
    g_engine = new Engine();
  }
  return *g_engine;
}

bool shutdownProcessEngine(Deadline deadline) {
  Engine* engine = nullptr;
  {
    const std::lock_guard<std::mutex> lock(g_mutex);
    engine = g_engine;
  }
  return engine == nullptr || engine->shutdown(deadline);
}

} // namespace pycomm
