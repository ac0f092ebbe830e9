#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/job_ranks.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "engine/join_abort.h"
#include "engine/meeting/endpoint.h"
#include "engine/meeting/instance.h"
#include "engine/meeting/meeting_store.h"
#include "transport/rendezvous/member_handle.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

/// This process's place in a group whose members change: its handle, and how it comes into each new Group. (torch: enable_reconfigure.)
///
/// A Group never changes its members and fails for good. So every reconfiguration makes a new one, and this keeps what outlives them: the
/// incarnation, the endpoint, and the uuids that were used. Nothing here needs torch's store. The first member of a list serves, in its memory and
/// at its endpoint, the store in which the members meet, and Group::join() does the rest as for any other group. Any thread.
class Reconfigurable {
 public:
  /// Opens this process's endpoint, unless another group has. `config`: of every Group to come, but for rank, size and deadline. `known`: the
  /// address at which the members reach this process already, if they do. `engine` outlives this. Throws what chooseRoute(), Listener::bind()
  /// and Security::open() throw.
  Reconfigurable(Engine& engine, Group::Config config, const SocketAddress& known = {});
  ~Reconfigurable();
  Reconfigurable(const Reconfigurable&) = delete;
  Reconfigurable& operator=(const Reconfigurable&) = delete;

  /// See MemberHandle. The same for as long as this lives.
  [[nodiscard]] std::string handle() const {
    return self_.text();
  }

  /// Nobody can meet this one from now on: its group was destroyed. Idempotent. Does nothing in a child of fork().
  void leave() noexcept {
    endpoint_->remove(incarnation_);
  }
  /// False in a child of fork(): the endpoint is the parent's.
  [[nodiscard]] bool belongsToThisProcess() const noexcept {
    return engine_.belongsToThisProcess();
  }

  /// Where members leave messages for this one: see Endpoint::Mailbox. Until leave().
  void receive(std::weak_ptr<Endpoint::Mailbox> mailbox) {
    endpoint_->receive(incarnation_, std::move(mailbox));
  }
  /// Lets processes find this one at that port, if this host is one of its hosts (none: it is not): see Endpoint::offer(). Waits for name servers
  /// until the deadline. Throws Error(InvalidArgument) if this process may have no port, and Error(ShutDown).
  [[nodiscard]] std::vector<Endpoint::Offer> offer(const FixedPort& port, Deadline deadline);
  void withdraw() noexcept {
    endpoint_->withdraw(incarnation_);
  }
  /// How this process goes to other members' endpoints. As long as this lives.
  [[nodiscard]] Visitor visitor() const {
    return {*endpoint_, self_, config_.transport != Transport::Tcp};
  }
  [[nodiscard]] Engine& engine() const noexcept {
    return engine_;
  }
  /// Of every group to come.
  [[nodiscard]] const Group::Config& config() const noexcept {
    return config_;
  }

  /// A list of members that this one may meet.
  struct Plan {
    std::shared_ptr<Instance> instance;
    int rank = -1; ///< this member's place in the list
    [[nodiscard]] int jobRank() const noexcept {
      return instance->job().of(rank);
    }
  };
  /// Checks the arguments, and from now on the uuid counts as used. `handles`: in the order of ranks. `called`: what records call the members;
  /// by default their ranks in the job, as the handles say, which have to differ then, or, if no handle says one, their places in the
  /// list. Nothing else happens yet, so a group that is there goes on if this throws
  /// Error(InvalidArgument | VersionMismatch | ConfigMismatch).
  [[nodiscard]] Plan plan(
      int64_t uuid,
      const std::vector<std::string>& handles,
      std::optional<JobRanks> called = std::nullopt);

  struct Met {
    std::shared_ptr<Store> store; ///< outlives the group
    std::shared_ptr<Group> group;
    std::shared_ptr<const Instance> instance; ///< whom it consists of
  };
  /// Meets the members, and makes the group. Blocks until all of them have it, or one of them gives up; that one says why, and all throw
  /// it. If this one gives up when all are ready already, it returns the group, which may have failed. Not later than 1 s after the deadline. Throws what Group::join() throws, and errors that name the member that was not met.
  /// `abort` ends it from another thread.
  [[nodiscard]] Met meet(const Plan& plan, Deadline deadline, JoinAbort& abort);

 private:
  [[nodiscard]] std::shared_ptr<Endpoint> openEndpoint(const SocketAddress& known);
  [[nodiscard]] ErrorRecord explained(ErrorRecord record, const Instance& instance) const;

  Engine& engine_;
  const Group::Config config_;
  const ProcessId incarnation_;
  const std::shared_ptr<Endpoint> endpoint_;
  const MemberHandle self_;
  std::mutex mutex_; ///< guards used_
  std::set<int64_t> used_;
};

} // namespace pycomm
