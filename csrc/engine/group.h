#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "engine/call.h"
#include "engine/closing.h"
#include "engine/engine.h"
#include "engine/issuer.h"
#include "engine/join_abort.h"
#include "engine/memory_sharing.h"
#include "engine/operation/codec_counters.h"
#include "engine/operation/operation.h"
#include "engine/operation/roster.h"
#include "engine/planes.h"
#include "engine/report/group_failure.h"
#include "engine/security.h"
#include "schedule/step.h"
#include "schedule/topology_view.h"
#include "transport/net/listener.h"
#include "transport/rendezvous/rendezvous.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

/// One process group on one rank: what everything above the engine talks to.
///
/// Any thread may call anything; nothing here needs Python. The group fails as a whole, once: after that every operation, under way
/// or new, ends with the same cause (`failure`).
class Group final : public std::enable_shared_from_this<Group> {
 public:
  struct Config {
    RendezvousConfig rendezvous; ///< rank, size, name, interface, ports, deadline of the joining
    int dead_after_ms = Membership::kDeadAfterMs; ///< of silence; the same on all ranks
    size_t flight_slots = 2000; ///< operations that the flight log keeps; 0 switches it off
    std::string flight_dump_prefix; ///< see FlightLog::Subject
    Transport transport = Transport::Auto; ///< the same on all ranks
    Security security; ///< with a secret, the store is a SealedStore of it
  };

  using Call = pycomm::Call;

  /// Meets the other ranks and connects control links; blocks until the deadline in `config` at most.
  /// Throws Error: whatever meet() throws, ConnectFailed naming the ranks that could not be reached, TooManyFiles.
  /// `engine` and `store` outlive the group.
  /// `abort` ends it from another thread.
  [[nodiscard]] static std::shared_ptr<Group> join(
      Engine& engine,
      Store& store,
      const Config& config,
      JoinAbort& abort);
  [[nodiscard]] static std::shared_ptr<Group> join(Engine& engine, Store& store, const Config& config) {
    JoinAbort nobody;
    return join(engine, store, config, nobody);
  }
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  /// Starts an operation and returns at once. Buffers stay alive and untouched until it has ended. Throws Error(InvalidArgument |
  /// Unsupported) for a call without meaning, Error(Forked) in a child of fork(); everything else is the operation's error.
  [[nodiscard]] std::shared_ptr<Operation> start(const Call& call);

  /// Lets an operation begin that was started `held`: its input is there now. If that never comes it ends at its deadline, or with the
  /// group; a release after that, or after abort(), does nothing, but until it, something may still write the input. Any thread.
  void release(const std::shared_ptr<Operation>& operation) {
    release(operation, std::numeric_limits<size_t>::max());
  }
  /// The same of one in pieces: so many have come. One thread at a time, with a count that only rises.
  void release(const std::shared_ptr<Operation>& operation, size_t pieces);

  /// Takes note of an operation that another library runs (Algorithm::Nccl). It has its place in the order of operations, is compared
  /// with the other ranks', recorded, and watched over like all others; nothing of it moves here. It ends with the group, or when
  /// followedEnded() says so; without memory for that, the group fails. Collectives only; throws as start() does.
  [[nodiscard]] std::shared_ptr<Operation> follow(const Call& call);
  void followedEnded(const std::shared_ptr<Operation>& operation, const std::optional<ErrorRecord>& error) noexcept;

  /// Whether this call may have its parts in buffers of their own. Small ones may not: their algorithms send several ranks' parts as
  /// one frame, and copying them costs little. Throws what start() throws for a call without meaning.
  [[nodiscard]] bool keepsParts(const ScheduleRequest& schedule);

  /// Waits until the operation has ended, or the deadline: true if it has ended. The calling thread runs the data loop meanwhile if no
  /// other does. Not on a native thread, and not with the interpreter's lock. Throws Error(Forked) in a child of fork() if it has not.
  [[nodiscard]] bool wait(const Operation& operation, Deadline deadline);

  /// Does what can be done now for an operation that was started by a caller that waits (Call::waits), on that caller's thread, without
  /// waiting, and wakes no other thread for the rest. Whether it has ended. To be followed by wait(), unless it has. Not on a native thread.
  [[nodiscard]] bool poll(const Operation& operation);

  /// Ends everything on every rank with `reason`, as if the group had failed, once the ranks have agreed on that. What this rank starts
  /// after the call ends with the group, and what it has started `held` and not released.
  void abort(const ErrorRecord& reason) noexcept;
  /// Leaves the group: not collective, bounded (about 50 ms; 1.6 s if a peer reads nothing), idempotent. Operations under way end with
  /// SHUT_DOWN. Not on a native thread.
  void close();

  /// abort() was called here.
  [[nodiscard]] bool isAborted() const noexcept {
    return aborted_.load(std::memory_order_acquire);
  }
  [[nodiscard]] bool hasFailed() const noexcept {
    return failure_.happened();
  }
  /// It has failed, or will, as abort() was called here.
  [[nodiscard]] bool isEnding() const noexcept {
    return isAborted() || hasFailed();
  }
  /// Why the group has failed, and what that did to the oldest operation that was under way here; nothing while all is well.
  [[nodiscard]] std::optional<ErrorRecord> failure() const {
    return failure_.record();
  }
  /// See GroupFailure::whenSet().
  void whenFailed(std::function<void()> then) {
    failure_.whenSet(std::move(then));
  }
  /// Of a group that has failed: see Membership::heardAt(), at that time.
  [[nodiscard]] const std::vector<TimePoint>& heardAt() const noexcept {
    return heard_at_;
  }
  /// Ends everything here and on every rank with `reason`, as abort() does, unless the group has failed already, and waits until every
  /// operation of this rank has ended. False at the deadline: close() ends them. Not on a native thread of the engine's.
  bool fail(const ErrorRecord& reason, Deadline deadline);
  /// By which LocalPeers of other processes find the process of this rank; empty if it has none.
  [[nodiscard]] const std::string& watchName(int rank) const {
    return roster_.watch_names.at(static_cast<size_t>(rank));
  }
  [[nodiscard]] const GroupIdentity& identity() const noexcept {
    return roster_.identity;
  }
  /// How many operations user threads have issued on this rank.
  [[nodiscard]] int64_t operationsIssued() const noexcept {
    return issuer_.issued();
  }
  [[nodiscard]] const CodecCounters& codecCounters() const noexcept {
    return issuer_.codecCounters();
  }
  [[nodiscard]] const std::string& addressReason() const noexcept {
    return roster_.address_reason;
  }
  [[nodiscard]] const std::string& interfaceName() const noexcept {
    return roster_.identity.interface_name;
  }
  /// RendezvousConfig::remark of all, by rank.
  [[nodiscard]] const std::vector<std::string>& remarks() const noexcept {
    return roster_.remarks;
  }
  [[nodiscard]] const TopologyView& topology() const noexcept {
    return roster_.topology;
  }
  [[nodiscard]] Engine& engine() noexcept {
    return engine_;
  }
  /// Collectives run in memory that all ranks share.
  [[nodiscard]] bool sharesMemory() const noexcept {
    return planes_.host() != nullptr;
  }
  /// What it keeps for operations, and its links in shared memory. Not on a native thread.
  [[nodiscard]] Usage usage();
  /// Tensors in the ranks' heaps (Engine::heap) are reached in place.
  [[nodiscard]] bool reachesTensors() const noexcept;
  /// Why they share no memory, although transport="tcp" was not asked for; empty otherwise.
  [[nodiscard]] const std::string& whyNotShared() const noexcept {
    return why_not_shared_;
  }
  [[nodiscard]] const FlightLog& flightLog() const noexcept {
    return *log_;
  }

 private:
  Group(Engine& engine, Store& store, std::shared_ptr<FlightLog> log, Roster roster);
  void connect(const Config& config, std::vector<Listener> listeners, const AbortToken& abort);
  void watchLocalPeers(const std::vector<int>& neighbours);
  void waitForNeighbours(Deadline deadline);
  void runToItsEnd(Closing& closing, const Closing::Step& step);
  /// Tells the others that this rank could not join, or that another group of its process has failed.
  void sayWhy() noexcept;
  void refuseInChild() const; ///< throws Error(Forked) in a child of fork()
  /// The only way to what a child of fork() does not have, threads and shared memory: every public entry reaches it through one of these. They
  /// throw Error(Forked) there.
  [[nodiscard]] Planes& planes() {
    refuseInChild();
    return planes_;
  }
  [[nodiscard]] EventLoop& dataLoop() {
    refuseInChild();
    return engine_.dataLoop();
  }
  [[nodiscard]] Planes::Events planeEvents();
  [[nodiscard]] std::shared_ptr<Operation> startChecked(const Call& call);
  [[nodiscard]] bool servedByHost(const ScheduleRequest& schedule) const noexcept;
  /// Which thread runs a step of the data plane.
  enum class RunOn {
    DataLoopThread,
    NextDriver, ///< the caller, which calls wait() next: the data loop's thread is not woken
    Caller, ///< now, if no other thread runs the data loop: EventLoop::postHere()
    CallerPatiently, ///< the same of a step that can only wait for other ranks
  };
  /// Runs Planes::run() on the data loop.
  void onDataLoop(Planes::DataStep step, const std::shared_ptr<Operation>& operation, RunOn thread);
  [[nodiscard]] std::shared_ptr<Operation> startOnHost(const Call& call);
  /// Issues an operation by `body`. If this process cannot, the group fails: the id may be taken, so the others would wait for this rank, and
  /// its next operation would not be theirs. A message takes no id, but its other rank would wait, too.
  template <typename Body>
  auto orFail(const Body& body);

  Engine& engine_;
  Store& store_;
  const std::shared_ptr<FlightLog> log_;
  const Roster roster_;
  Issuer issuer_;
  GroupFailure failure_;
  std::vector<TimePoint> heard_at_; ///< written once, before failure_
  std::vector<uint64_t> watches_; ///< of engine_.localPeers(); of the control loop
  bool crowds_ = false; ///< it is one of those that EventLoop::addCrowded() counts; until close()

  Planes planes_;
  std::string why_not_shared_;

  std::mutex close_mutex_; ///< guards closed_; held while closing, so that a second caller waits for the first
  bool closed_ = false;
  std::atomic<bool> aborted_{false}; ///< abort() has been called

  std::atomic<bool> ended_{false}; ///< the group has failed, and every operation has ended
};

} // namespace pycomm
