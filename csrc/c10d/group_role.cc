#include "c10d/group_role.h"

#include <utility>

#include "engine/operation/issue_context.h"

namespace pycomm {
namespace {

LeafMutex g_job_mutex; ///< guards g_last
std::shared_ptr<GroupRole> g_last; ///< of the groups of the job

uint64_t mixText(uint64_t value, const std::string& text) noexcept {
  for (const char c : text) {
    value = mix64(value ^ static_cast<unsigned char>(c));
  }
  return mix64(value + text.size());
}

} // namespace

std::shared_ptr<GroupRole> GroupRole::next(const c10d::Backend& backend, std::optional<bool> starts_world) {
  if (!starts_world) {
    return std::shared_ptr<GroupRole>(new GroupRole(&backend, 0, 0));
  }
  const std::lock_guard lock(g_job_mutex);
  if (*starts_world) {
    g_last = nullptr;
  }
  const uint64_t before = g_last == nullptr ? 0 : g_last->hash();
  const uint32_t number = g_last == nullptr ? 1 : g_last->number() + 1;
  g_last = std::shared_ptr<GroupRole>(new GroupRole(&backend, before, number));
  return g_last;
}

void GroupRole::startWorld() noexcept {
  const std::lock_guard lock(g_job_mutex);
  g_last = nullptr;
}

std::shared_ptr<GroupRole> GroupRole::ofMeeting(const std::string& name, uint32_t number) {
  std::shared_ptr<GroupRole> role(new GroupRole(nullptr, 0, number));
  role->hash_ = mixText(0, name);
  return role;
}

void GroupRole::settle() {
  const std::lock_guard lock(mutex_);
  if (const c10d::Backend* const backend = std::exchange(backend_, nullptr)) {
    hash_ = mixText(mix64(before_ + static_cast<uint64_t>(backend->getSize())), backend->getGroupDesc());
  }
}

GroupRole::Message GroupRole::takeMessage() {
  const std::lock_guard lock(mutex_);
  const bool ambiguous = !asks_.isThis();
  return {messages_++, ambiguous};
}

} // namespace pycomm
