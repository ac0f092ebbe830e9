#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "engine/meeting/endpoint.h"
#include "engine/meeting/instance.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

/// An endpoint that refuses is tried again every kLastConnectPauseMs. After so many refusals in a row its process has ended.
inline constexpr int kRefusals = 3;

/// The store in which the members of one reconfigure() meet, as one of them sees it: in its own memory, or behind the first member's endpoint.
/// It is of use until all are ready; after that, and after a failure, every call throws.
class MeetingStore : public Store {
 public:
  [[nodiscard]] std::string get(const std::string& key, Deadline deadline) override;

  /// This member has its group. How many have.
  [[nodiscard]] virtual Instance::Ready ready() = 0;
  /// This member gives up: all others get the cause. False if all were ready already: then the meeting has succeeded.
  virtual bool fail(const ErrorRecord& cause) noexcept = 0;
  /// Nothing of it is needed any more.
  virtual void finish() noexcept = 0;
};

/// The first member's.
class OwnMeeting final : public MeetingStore {
 public:
  explicit OwnMeeting(std::shared_ptr<Instance> instance) : instance_(std::move(instance)) {}

  void set(const std::string& key, const std::string& value) override {
    instance_->set(key, value);
  }
  [[nodiscard]] bool has(const std::string& key) override {
    return instance_->has(key);
  }
  [[nodiscard]] std::optional<std::string> find(const std::string& key) override {
    return instance_->find(key);
  }
  [[nodiscard]] int64_t add(const std::string& key, int64_t amount) override {
    return instance_->add(key, amount);
  }
  bool remove(const std::string& key) override {
    return instance_->remove(key);
  }
  [[nodiscard]] Instance::Ready ready() override {
    return instance_->ready(0);
  }
  bool fail(const ErrorRecord& cause) noexcept override;
  void finish() noexcept override;

 private:
  const std::shared_ptr<Instance> instance_;
};

/// The process that connects to an endpoint.
struct Visitor {
  const Endpoint& endpoint; ///< of this process
  MemberHandle self;
  bool unix_sockets = true;
};

/// Begins to connect to a member's endpoint by one of its ways (waysTo). Throws what GreetedLink does.
[[nodiscard]] std::unique_ptr<Link> openWay(const MemberHandle& to, const SocketAddress& way, const Visitor& from);

/// What one attempt has found.
struct Dialed {
  std::unique_ptr<Link> link; ///< null: nobody answered
  bool nobody_listens = false; ///< every way was refused: the process has ended
  bool another_listens = false; ///< another process has that port now
  std::string why;
};

/// What an error says of such a member.
inline constexpr const char* kNobodyListens =
    "is gone: nobody listens at its address, so its process has ended, or has destroyed that group";
inline constexpr const char* kAnotherListens = "is gone: another process listens at its address now";

/// Tries each way to a member's endpoint once, until the deadline. Throws the token's reason.
[[nodiscard]] Dialed dial(const MemberHandle& to, const Visitor& from, Deadline deadline, const AbortToken& abort);

/// One request over a link of dial(), and its answer. Throws Error(ConnectionReset | Timeout | ProtocolViolation).
[[nodiscard]] std::vector<std::string> askEndpoint(
    Link& link,
    const std::vector<std::string_view>& request,
    Deadline deadline,
    const AbortToken& abort);

/// The request with which `rank` asks for an instance at the endpoint of member `to`.
[[nodiscard]] std::vector<std::string> requestFor(std::string_view what, const Instance& instance, int to, int rank);

/// What an answer to such a request says of that member, if it cannot be met; nothing if it can, or cannot yet.
[[nodiscard]] std::optional<ErrorRecord> refusalIn(
    const std::vector<std::string>& answer,
    const Instance& instance,
    int to,
    int rank);

/// The other members'.
class RemoteMeeting final : public MeetingStore {
 public:
  /// Enters at the first member's endpoint as soon as that has called reconfigure(). Blocks. Throws Error(RendezvousTimeout | PeerDead |
  /// ConfigMismatch | ConnectFailed) that name it, its failure, or the token's reason. `unresponsive_ms`: how long it may take for an answer.
  RemoteMeeting(
      std::shared_ptr<Instance> instance,
      int rank,
      const Visitor& from,
      Deadline deadline,
      int unresponsive_ms,
      const AbortToken& abort);

  void set(const std::string& key, const std::string& value) override;
  [[nodiscard]] bool has(const std::string& key) override;
  [[nodiscard]] std::optional<std::string> find(const std::string& key) override;
  [[nodiscard]] int64_t add(const std::string& key, int64_t amount) override;
  bool remove(const std::string& key) override;
  [[nodiscard]] Instance::Ready ready() override;
  bool fail(const ErrorRecord& cause) noexcept override;
  void finish() noexcept override;

 private:
  void enter(const Visitor& from, const AbortToken& abort);
  [[nodiscard]] std::vector<std::string> ask(const std::vector<std::string_view>& request);
  /// Why this member gives up, for a first member that does not answer: it finds that when it goes on, behind the request.
  void leaveWord(const ErrorRecord& why) const noexcept;

  const std::shared_ptr<Instance> instance_;
  const int rank_;
  const Deadline deadline_;
  const int unresponsive_ms_;
  std::mutex mutex_; ///< guards the rest: the group that closes is on another thread
  std::unique_ptr<Link> link_; ///< null: finished
  std::optional<ErrorRecord> broken_;
};

} // namespace pycomm
