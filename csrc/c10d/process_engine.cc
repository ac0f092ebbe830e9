#include "c10d/process_engine.h"

#include <mutex>

#include "c10d/interruptible.h"

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

std::shared_ptr<Group> joinGroup(Store& store, const Group::Config& config) {
  const Interruptible interruptible(&store);
  std::shared_ptr<Group> group;
  try {
    group = Group::join(processEngine(), store, config);
  } catch (...) {
    interruptible.rethrow();
    throw;
  }
  interruptible.rethrow();
  return group;
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
