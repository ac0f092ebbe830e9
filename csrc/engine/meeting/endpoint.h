#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "engine/loop/event_loop.h"
#include "engine/meeting/fixed_port.h"
#include "engine/meeting/instance.h"
#include "transport/net/acceptor.h"
#include "transport/net/listener.h"
#include "transport/rendezvous/member_handle.h"

namespace pycomm {

/// Where other processes connect to meet this one: one listening socket for each interface of the process, whatever number of groups it
/// has, and however often these are reconfigured; and those of offer(). It answers for every incarnation of this process that can be met, and lets members into
/// the Instance that they name. A connection carries no frame of a group: groups open links of their own when their ranks have met.
///
/// A connection names the incarnation that it looks for and the one that it comes from, and, to enter or to look, the instance; one that asks
/// who the members are only the first, or at a fixed port none. If any of them is not the one here, it gets that answer and nothing else.
///
/// It listens and answers on the control loop, where an answer takes microseconds. Any thread may call what is public.
class Endpoint final {
 public:
  /// Takes the messages of an agreement that other members, and newcomers, bring to the endpoint. On the control loop: it must not block.
  class Mailbox {
   public:
    virtual ~Mailbox() = default;
    /// Whether `from` may bring messages. `handle`: as it calls itself. `endpoint`: the process at the other end, if the connection is in TLS.
    [[nodiscard]] virtual bool knows(
        const ProcessId& from,
        const std::string& handle,
        const std::optional<ProcessId>& endpoint) = 0;
    /// False if `from` may not bring messages any more: it has to introduce itself again.
    [[nodiscard]] virtual bool deliver(const ProcessId& from, const std::string& bytes) = 0;
    /// The answer to a process that wants to become a member; empty: none can.
    [[nodiscard]] virtual std::vector<std::string> notice() const {
      return {};
    }
    /// A part of the members' state, for a newcomer. False: it is of no use here.
    [[nodiscard]] virtual bool take(const ProcessId& /*from*/, const std::vector<std::string>& /*words*/) {
      return false;
    }
  };

  struct Config {
    std::vector<Listener> listeners;
    std::string unix_name; ///< of the listener that is a Unix socket; empty: there is none
    std::shared_ptr<const TlsContext> tls; ///< null: no secret
    ProcessId id; ///< of this endpoint: MemberHandle::endpoint
    uint64_t nonce = 0; ///< of a Hello over TCP
  };

  [[nodiscard]] static std::shared_ptr<Endpoint> open(EventLoop& control, Config config);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  /// Hangs up, and listens no more. Idempotent. Not on the control loop. In a child of fork() it does nothing.
  void close() noexcept;

  /// The fields of a handle that are the endpoint's.
  [[nodiscard]] MemberHandle addressed(MemberHandle handle) const;
  [[nodiscard]] const std::shared_ptr<const TlsContext>& tls() const noexcept {
    return tls_;
  }

  /// From now on this incarnation can be met here, until removed.
  void add(const ProcessId& incarnation);
  void remove(const ProcessId& incarnation) noexcept;
  /// This incarnation has called reconfigure(). Throws Error(ShutDown) if it was removed. The instance of its last call counts no more, unless somebody asks why it failed: for a
  /// minute, and only of the last 16.
  void call(const ProcessId& incarnation, std::shared_ptr<Instance> instance);
  /// Messages for this incarnation go there from now on, until it is removed, for as long as the mailbox lives.
  void receive(const ProcessId& incarnation, std::weak_ptr<Mailbox> mailbox);

  /// An address at which this incarnation is to be found: see FixedPort.
  struct Offer {
    SocketAddress address;
    std::string busy; ///< why this process does not listen there yet; empty: it does
  };
  /// Listens there, too, until withdraw() or remove(). One process at a time has a port: where another one has it, this one tries again every
  /// kOfferAgain. `tls`: null without a secret; else FixedPort::kProcess is its own id.
  static constexpr std::chrono::milliseconds kOfferAgain{kLookAgainMs};
  [[nodiscard]] std::vector<Offer> offer(
      const ProcessId& incarnation,
      const std::vector<SocketAddress>& addresses,
      const std::shared_ptr<const TlsContext>& tls);
  /// Leaves the ports of offer() to others, soon. Idempotent. Does nothing in a child of fork().
  void withdraw(const ProcessId& incarnation) noexcept;

  /// The number in a Hello over a Unix socket, which is not in TLS: with a secret, only its holders know it.
  [[nodiscard]] static uint64_t unixNonce(const MemberHandle& handle, const TlsContext* tls);
  /// How a process introduces itself at an endpoint.
  [[nodiscard]] static Hello hello(uint64_t nonce);

 private:
  class Ears; ///< the acceptors, on the loop
  class Session;
  struct Called {
    std::shared_ptr<Instance> instance;
    TimePoint since;
  };

  Endpoint(EventLoop& control, const Config& config);
  /// `found`: the incarnation at whose fixed port it came; else empty.
  void admit(Accepted accepted, const ProcessId& found);
  /// The answer to a request, packed.
  [[nodiscard]] std::string answer(Session& session, const std::vector<std::string>& request);
  [[nodiscard]] std::string letIn(Session& session, const std::vector<std::string>& request);
  [[nodiscard]] std::string introduce(Session& session, const std::vector<std::string>& request);
  [[nodiscard]] std::string answerWho(const Session& session, const std::vector<std::string>& request) const;
  [[nodiscard]] std::shared_ptr<Mailbox> mailboxOf(const ProcessId& to, std::string& why) const;
  [[nodiscard]] std::shared_ptr<Instance> find(
      const ProcessId& to,
      const std::string& name,
      int64_t uuid,
      std::string& why);
  void forgetOld(std::deque<Called>& called, TimePoint now) const;

  EventLoop& control_;
  const uint32_t forks_; ///< forkCount() of the process that this belongs to
  const std::shared_ptr<const TlsContext> tls_;
  const ProcessId id_;
  const uint64_t nonce_;
  const std::string unix_name_;
  std::vector<SocketAddress> addresses_;

  // The control loop's:
  std::unique_ptr<Ears> ears_;
  std::vector<std::unique_ptr<Session>> sessions_; ///< dropped only by the tick: one may be the caller

  mutable std::mutex mutex_; ///< guards the rest
  std::map<ProcessId, std::deque<Called>> here_; ///< by incarnation: what it has called, the newest last
  std::map<ProcessId, std::weak_ptr<Mailbox>> mailboxes_;
  bool closed_ = false;
};

} // namespace pycomm
