#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "base/unique_fd.h"
#include "engine/loop/event_loop.h"
#include "transport/memory/death_watch.h"
#include "transport/memory/memory_key.h"
#include "transport/memory/shared_arena.h"

namespace pycomm {

/// The memory of groups that other processes may ask this one for: one or two keys for each group that forms, and one for each process of an
/// elastic job (KeptRecord). It lives as long as the offer.
class MemoryOffers {
 public:
  using Memory = std::shared_ptr<const SharedArena>;

  /// `memory`: null if there is none.
  void set(const MemoryKey& key, Memory memory) {
    remove(key);
    offers_.emplace_back(key, std::move(memory));
  }
  void remove(const MemoryKey& key) noexcept {
    offers_.erase(
        std::remove_if(offers_.begin(), offers_.end(), [&](const auto& offer) { return offer.first == key; }),
        offers_.end());
  }
  /// Null if nothing is offered for the key.
  [[nodiscard]] const Memory* find(const MemoryKey& key) const noexcept {
    const Memory* found = nullptr;
    for (const auto& [offered, memory] : offers_) { // to the end: the time does not depend on the key
      found = offered == key ? &memory : found;
    }
    return found;
  }

 private:
  std::vector<std::pair<MemoryKey, Memory>> offers_;
};

/// The other processes of this host that groups share with this one: each is watched (DeathWatch), once however many groups there are.
///
/// Each process has a Unix socket without a file; its random name travels with the rank's record in the store. A process that connects,
/// and runs as the same user, is sent the words of DeathWatch and the number of the one that it may use. It keeps the connection for as
/// long as it watches. If that cannot be had (a container without memfd, another user, no descriptors left), one INFO line says so, and
/// a death is noticed by its sockets, like that of a rank on another host.
/// Thread: the control loop's, except where said.
class LocalPeers final : Loop::Ticker {
 public:
  using Died = std::function<void()>;

  using Report = std::function<std::string()>;

  /// `report`: makes the reply to a process of the same user that asks what this one does (`pycomm status`). Called on the control loop.
  explicit LocalPeers(EventLoop& loop, Report report = {});
  ~LocalPeers() override;
  LocalPeers(const LocalPeers&) = delete;
  LocalPeers& operator=(const LocalPeers&) = delete;

  /// The name that other processes watch this one by; empty where there is none. Not on the control loop: opens the socket when first
  /// asked.
  [[nodiscard]] std::string name();

  /// Calls `died` on the control loop if the process of that name ends otherwise than through close(). Takes effect soon, never
  /// blocks. Throws only std::bad_alloc, and then watches nothing.
  uint64_t watch(const std::string& name, Died died);
  void unwatch(uint64_t interest) noexcept;

  /// Has memory of a group ready for processes that ask for it by `key`, or null: there is none. Keeps it until withdraw(), so that a
  /// descriptor of it is never that of something else.
  void offer(const MemoryKey& key, MemoryOffers::Memory memory);
  void withdraw(const MemoryKey& key) noexcept;
  /// Asks the process of that name for the memory of a group, and waits until it has it to offer. On the calling thread, which is not
  /// the control loop's. Throws Error saying why there is none, or the token's reason.
  [[nodiscard]] static UniqueFd ask(
      const std::string& name,
      const MemoryKey& key,
      Deadline deadline,
      const AbortToken& abort);

  /// Leaves in order. Call from another thread than the loop's, before the loop stops. Idempotent.
  void close() noexcept;

 private:
  struct Server;
  struct Watcher;
  struct Watched;

  // Loop::Ticker: connections that came while this process could open no more files
  [[nodiscard]] TimePoint nextTick() const noexcept override {
    return admit_again_;
  }
  void tick(TimePoint now) noexcept override;

  void open();
  void admit();
  void hearWatcher(Watcher& watcher);
  void answer(Watcher& watcher) noexcept;
  void answerReport(int socket) noexcept;
  void dismiss(int fd) noexcept;
  void heard(Watched& watched);
  void connect(Watched& watched);
  using WatchedByName = std::unordered_map<std::string, std::unique_ptr<Watched>>;
  void forget(WatchedByName::iterator watched) noexcept;
  void onDeath(uint64_t watch);
  /// Then a death is noticed by its connections.
  void onThrown(const std::exception_ptr& exception) noexcept override;
  [[nodiscard]] DeathWatch& deathWatch();

  EventLoop& loop_;
  const Report report_;
  std::mutex name_mutex_; ///< guards name_ and opened_
  std::string name_;
  bool opened_ = false;
  bool closed_ = false;
  std::unique_ptr<Server> server_;
  TimePoint admit_again_ = TimePoint::max(); ///< when a pause in accepting ends
  std::unordered_map<int, std::unique_ptr<Watcher>> watchers_; ///< who watches us, by descriptor
  WatchedByName watched_; ///< whom we watch, by name
  MemoryOffers offers_; ///< their owners withdraw them first
  uint64_t next_interest_ = 1;
  std::unique_ptr<DeathWatch> death_watch_; ///< made when first needed
};

} // namespace pycomm
