#pragma once

#include <exception>
#include <functional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/data/plane_end.h"
#include "engine/monitor/question.h"
#include "engine/operation/group_identity.h"

namespace pycomm {

/// What a data plane reports to the control plane. Once the plane ends, it reports no failure and no doubt. Outgoing keeps its questions back then.
/// Thread: the lane's.
class Reporter {
 public:
  /// Any thread may be behind these; they must not block.
  struct Events {
    std::function<void(ErrorRecord)> noticed;
    /// A peer said goodbye on its bulk link. The goodbye on its control link may get lost.
    std::function<void(int peer)> left;
    /// A link broke, no operation needs it, and no goodbye came in time. This is a failure if the peer is still in the group.
    std::function<void(ErrorRecord)> doubted;
    /// For other ranks, over control links.
    std::function<void(std::vector<Question>)> ask;
  };

  /// The identity and the end outlive this.
  Reporter(const GroupIdentity& identity, const PlaneEnd& end, Events events)
      : identity_(identity), end_(end), events_(std::move(events)) {}

  /// The group has failed, as far as this rank knows.
  void notice(ErrorRecord record) const {
    if (end_.running()) {
      events_.noticed(std::move(record));
    }
  }
  /// The same for an exception; `peer` is to blame, -1 for nobody.
  void noticeThrown(int peer, const std::exception_ptr& exception) const;
  void doubt(ErrorRecord record) const {
    if (end_.running()) {
      events_.doubted(std::move(record));
    }
  }
  void left(int peer) const {
    events_.left(peer);
  }
  void ask(std::vector<Question> questions) const {
    events_.ask(std::move(questions));
  }

 private:
  const GroupIdentity& identity_;
  const PlaneEnd& end_;
  const Events events_;
};

} // namespace pycomm
