#pragma once

#include <deque>
#include <vector>

#include "engine/data/plane_end.h"
#include "engine/data/reporter.h"
#include "engine/links/channel.h"
#include "engine/links/peer_links.h"
#include "engine/monitor/question.h"
#include "transport/frame_header.h"

namespace pycomm {

/// Decides which way a frame leaves this rank: over the bulk link to its peer, over control links, or to this rank itself. Once the plane
/// ends, no frame leaves.
///
/// It keeps what has no link of its own: frames from this rank to itself, and questions for control links.
/// Thread: the lane's.
class Outgoing {
 public:
  /// All of these outlive this.
  Outgoing(int rank, PeerLinks& links, const PlaneEnd& end, const Reporter& reporter)
      : rank_(rank), links_(links), end_(end), reporter_(reporter) {}

  /// A frame of an operation.
  void push(int peer, OutFrame&& frame);
  /// A frame without payload. If an operation `needs` it, it fails the group if it cannot be sent; else that is logged.
  void send(int peer, const FrameHeader& header, bool needs);
  /// Over the bulk link if there is one, else over control links: see Action::Way.
  void ask(int peer, const FrameHeader& question);
  /// Those that ask() has for control links.
  void sendQuestions();

  // ---- questions
  [[nodiscard]] size_t frames() const noexcept {
    return to_self_.size() + questions_.size();
  }

  // ---- frames from this rank to itself
  [[nodiscard]] bool hasOwn() const noexcept {
    return !to_self_.empty();
  }
  /// The oldest, if there is any.
  [[nodiscard]] OutFrame takeOwn();
  void dropOwn() noexcept {
    to_self_.clear();
  }

 private:
  const int rank_;
  PeerLinks& links_;
  const PlaneEnd& end_;
  const Reporter& reporter_;
  std::deque<OutFrame> to_self_; ///< between a send to this rank and its receive
  std::vector<Question> questions_; ///< that have not left yet
};

} // namespace pycomm
