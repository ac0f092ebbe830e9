#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "engine/links/channel.h"
#include "engine/loop/loop.h"
#include "engine/monitor/membership.h"
#include "engine/monitor/missing_neighbours.h"
#include "engine/monitor/question.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/unreported.h"
#include "transport/net/acceptor.h"

namespace pycomm {

/// A group's half on the control loop: the listening sockets, control links, heartbeats, and what the group died of.
/// Thread: the control loop's, except where said.
class ControlPlane final : public Loop::Handler, public Loop::Ticker {
 public:
  struct Events {
    /// The group has failed. Called once.
    std::function<void(const ErrorRecord&)> failed;
    /// A peer opened a bulk link.
    std::function<void(const Hello& hello, std::unique_ptr<Link>)> bulk_link;
    /// A peer said goodbye on its control link, or to a rank that passed that on.
    std::function<void(int peer)> left;
    /// A rank asks this one who has entered an operation, or answers.
    std::function<void(int from, const FrameHeader& question)> asked;
  };

  ControlPlane(
      GroupIdentity identity,
      Loop& loop,
      std::vector<Listener> listeners,
      Membership::Config membership,
      Events events);
  ~ControlPlane() override;

  /// Starts accepting.
  void open();
  /// A peer that connected and said who it is.
  void welcome(Accepted accepted);
  /// A control link that this rank opened.
  void adopt(int peer, std::unique_ptr<Link> link);
  void notice(const ErrorRecord& record);
  /// See Membership::doubted.
  void doubt(const ErrorRecord& record);
  /// A peer said goodbye on its bulk link.
  void peerLeft(int peer);
  /// This rank will leave because it could not join, or something else in its process has failed. All others learn it, before any goodbye:
  /// what fails because this rank has left says so.
  void leaving(const ErrorRecord& why);
  /// Sends questions and answers about operations (waiting.h) to other ranks. They are passed from neighbour to neighbour, so no connection is opened
  /// for them: log2 N links at the most, and some more around ranks that are silent or have left. Nothing may depend on them: a frame is
  /// lost if its goal has left, and may be if a rank on its way stops just then. A rank on the way is trusted to pass on what it was given,
  /// as all ranks of a group trust each other with their results.
  void ask(const std::vector<Question>& questions);
  /// The process of a neighbour on this host has ended, as its DeathWatch says.
  void died(int peer);
  /// Says goodbye on all links and stops. The links, for closeAllGently() on another thread: the loop serves other groups.
  std::vector<std::unique_ptr<Link>> close() noexcept;

  /// Why no connection can be accepted at the moment, if so.
  [[nodiscard]] std::optional<ErrorRecord> trouble() const;

  /// See Membership::heardAt().
  [[nodiscard]] std::vector<TimePoint> heardAt() const {
    return membership_.heardAt();
  }

  /// Any thread: see MissingNeighbours::wait(). `abort` is the group's failure.
  [[nodiscard]] std::vector<int> waitForNeighbours(Deadline deadline, const AbortToken& abort) {
    return missing_.wait(deadline, abort);
  }

  // Loop::Handler (the acceptors' descriptors), Loop::Ticker
  void onReady(uint32_t events) override;
  [[nodiscard]] TimePoint nextTick() const noexcept override;
  void tick(TimePoint now) override;
  /// Whatever is thrown becomes the group's failure, as soon as there is memory for that.
  void onThrown(const std::exception_ptr& exception) noexcept override;

 private:
  struct ControlLink;

  void poll();
  void act();
  void tell(const Membership::Action& action);
  void tellFailure();
  void tellNews(ControlLink& link);
  void sendTo(ControlLink& link, const FrameHeader& header, const std::string& payload);
  void linkReady(ControlLink& link, uint32_t events);
  /// Where a frame for `rank` goes next; it came from neighbour `from`, or from this rank itself. Null if there is nobody else.
  [[nodiscard]] ControlLink* towards(int rank, int from);
  void passOn(Route route, const FrameHeader& question, int from);
  void flushAll();
  void flushOrDrop(ControlLink& link);
  void flush(ControlLink& link);
  void writingBroke(ControlLink& link, const Error& error);
  void linkBroke(ControlLink& link, const Error& error);
  void dropLink(ControlLink& link, const std::string& cause, bool broke);
  /// Throw Error(ProtocolViolation) for what no pycomm of this group sends.
  void checkHeader(int peer, const FrameHeader& header) const;
  void onFrame(int peer, const FrameHeader& header, ConstBufferView payload);
  [[nodiscard]] FrameHeader header(FrameType type) const;

  const GroupIdentity identity_;
  Loop& loop_;
  const Events events_;
  std::vector<std::unique_ptr<Acceptor>> acceptors_; ///< none where somebody else listens: a simulator
  Membership membership_;
  StagingPool staging_;
  std::unordered_map<int, std::unique_ptr<ControlLink>> links_;
  std::vector<Membership::Action> undone_; ///< of membership_, in order; without memory the next tick goes on
  std::optional<ErrorRecord> untold_; ///< the group's failure, until Events::failed has been called
  Unreported unreported_; ///< by onThrown()
  MissingNeighbours missing_;
  bool open_ = false;
};

} // namespace pycomm
