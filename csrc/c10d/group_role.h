#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "base/wait_point.h"

namespace pycomm {

/// Whether it is always the same thread that does something. Not thread-safe.
class OneThread {
 public:
  /// The calling thread does it. False if another one has done it before.
  [[nodiscard]] bool isThis() noexcept {
    if (first_ == std::thread::id()) {
      first_ = std::this_thread::get_id();
    }
    several_ = several_ || first_ != std::this_thread::get_id();
    return !several_;
  }

 private:
  std::thread::id first_;
  bool several_ = false;
};

/// Which of this process's groups a group is: equal on ranks that have made groups of the same descriptions and sizes so far, in the same
/// order, of any ranks. So the two halves of a mesh have one role. Ranks whose memberships are not alike have different roles, and
/// never match by chance.
///
/// Counted from the default group on: a process that joins later, or again, counts like the others. Any thread.
class GroupRole {
 public:
  /// Of a group that is made now. `starts_world`: it is the default group, or the first of ours after a new one; nothing: it is of no
  /// job. `backend` calls settle() before it ends.
  [[nodiscard]] static std::shared_ptr<GroupRole> next(const c10d::Backend& backend, std::optional<bool> starts_world);

  /// As next() with `starts_world`, for a default group that has no role yet: the next one is the job's first.
  static void startWorld() noexcept;

  /// Of a group that was reconfigured: its members have had other groups before, so its role is the name of their meeting, which is no
  /// other group's. `number`: of the group that it was at first.
  [[nodiscard]] static std::shared_ptr<GroupRole> ofMeeting(const std::string& name, uint32_t number);

  /// Known when torch has set its description of the group: it does so after it has made the backend and before anybody has it.
  [[nodiscard]] uint64_t hash() {
    settle();
    return hash_;
  }
  /// How many-th group of the job this is in its process, from 1; 0 if it is of no job.
  [[nodiscard]] uint32_t number() const noexcept {
    return number_;
  }
  /// Takes note of the description.
  void settle();
  struct Message {
    uint32_t index; ///< from 0
    bool ambiguous; ///< several threads ask for such futures
  };
  /// A user thread asks for the future of a message of the group.
  [[nodiscard]] Message takeMessage();

 private:
  GroupRole(const c10d::Backend* backend, uint64_t before, uint32_t number)
      : backend_(backend), before_(before), number_(number) {}

  LeafMutex mutex_; ///< guards backend_, hash_ and messages_
  const c10d::Backend* backend_; ///< until the description is known
  const uint64_t before_; ///< the role of the group that was made before it
  uint64_t hash_ = 0; ///< constant as soon as backend_ is null
  const uint32_t number_;
  uint32_t messages_ = 0;
  OneThread asks_;
};

} // namespace pycomm
