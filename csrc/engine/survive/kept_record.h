#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/unique_fd.h"
#include "elastic/message.h"
#include "engine/engine.h"
#include "transport/memory/memory_key.h"
#include "transport/memory/shared_arena.h"
#include "transport/rendezvous/member_handle.h"
#include "transport/secure/secret.h"

namespace pycomm {

/// By which the processes of a host ask for the record of a member. With a secret, only its holders can.
[[nodiscard]] MemoryKey recordKey(const ProcessId& incarnation, const Secret* secret);

/// Where this process keeps its elastic::Record, so that other processes of its host can read it when it has ended: memory without a name,
/// which lives as long as anybody has mapped it.
///
/// There are two places. A record goes into the one that does not count, and then a number says that it does: a process that is killed in
/// the middle has kept the record before. One thread.
class KeptRecord final {
 public:
  /// Offers the memory to the processes of this host (LocalPeers). Throws what SharedArena does. `engine` outlives this.
  KeptRecord(Engine& engine, const MemoryKey& key);
  ~KeptRecord();
  KeptRecord(const KeptRecord&) = delete;
  KeptRecord& operator=(const KeptRecord&) = delete;

  void keep(const elastic::Record& record);

 private:
  Engine& engine_;
  const MemoryKey key_;
  const std::shared_ptr<const SharedArena> memory_;
  uint64_t kept_ = 0;
};

/// Another process of this host, of which the kernel says when it has ended, and what it had kept. One thread.
class Witness final {
 public:
  /// Waits until that process offers its record, which shows that it lived after the kernel was asked. Throws Error that says why there
  /// will be no certificate: an old kernel, another pid namespace, no answer. `watch_name`: Group::watchName().
  [[nodiscard]] static Witness of(
      const MemberHandle& process,
      const std::string& watch_name,
      const MemoryKey& key,
      Deadline deadline);

  /// Readable once all threads of the process have ended.
  [[nodiscard]] int fd() const noexcept {
    return process_.get();
  }
  /// The last that it has kept. nullopt if another program has written there.
  [[nodiscard]] std::optional<elastic::Record> record() const;

 private:
  Witness(UniqueFd process, SharedArena memory) : process_(std::move(process)), memory_(std::move(memory)) {}

  UniqueFd process_; ///< a pidfd
  SharedArena memory_;
};

} // namespace pycomm
