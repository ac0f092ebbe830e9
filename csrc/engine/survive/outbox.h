#pragma once

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "engine/meeting/meeting_store.h"
#include "transport/link.h"
#include "transport/net/address.h"
#include "transport/rendezvous/member_handle.h"

namespace pycomm {

/// Messages for one member, brought to its endpoint, in order. Connects when there is the first one, and hangs up when there was none for a
/// while. Nothing is promised: a member that does not answer gets nothing, and the agreement sends again.
///
/// Never blocks; the owner polls fd() for events(), and calls advance() then, and at nextTick(). One thread.
class Outbox final {
 public:
  /// `from` refers to what outlives this.
  Outbox(MemberHandle to, const Visitor& from);

  /// Beyond kMost the oldest is dropped.
  void push(std::string message);
  void advance(TimePoint now) noexcept;
  /// -1: nothing is to be polled.
  [[nodiscard]] int fd() const noexcept {
    return link_ == nullptr ? -1 : link_->fd();
  }
  [[nodiscard]] short events() const noexcept;
  [[nodiscard]] TimePoint nextTick() const noexcept;
  /// Nothing waits to be sent, or for an answer.
  [[nodiscard]] bool isIdle() const noexcept {
    return queue_.empty();
  }

  /// The member has answered on the connection that there is.
  [[nodiscard]] bool hasEntered() const noexcept {
    return entered_;
  }
  /// Since the last call, nobody listened at any of its addresses: each of them answered so.
  [[nodiscard]] bool wasRefused() noexcept {
    return std::exchange(refused_, false);
  }

  static constexpr size_t kMost = 128;

 private:
  void open(TimePoint now);
  [[nodiscard]] bool converse(TimePoint now); ///< false: nothing more can be done now
  void ask();
  void hangUp() noexcept;
  /// This way did not lead to the member: the next one. After the last, what waits is dropped.
  void wayFailed(TimePoint now) noexcept;
  void giveUp(TimePoint now) noexcept;
  /// A connection that worked has ended: another one takes what waits.
  void lost(TimePoint now) noexcept;

  const MemberHandle to_;
  const Visitor from_;
  const std::vector<SocketAddress> ways_;
  std::deque<std::string> queue_; ///< the first is under way if `asked_` and `entered_`
  std::unique_ptr<Link> link_;
  size_t way_ = 0; ///< of link_, or the next to try
  size_t refusals_ = 0; ///< of the ways before it
  bool refused_ = false;
  bool connected_ = false;
  bool entered_ = false;
  bool asked_ = false; ///< an answer is due
  std::string out_; ///< what link_ has not taken yet
  std::string in_;
  TimePoint due_ =
      TimePoint::max(); ///< when a connection that is made, or an answer, is late; of an idle link, when it ends
  TimePoint not_before_; ///< of the next connection
};

} // namespace pycomm
