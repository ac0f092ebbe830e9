#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/monitor/roll_call_config.h"
#include "transport/frame_header.h"

namespace pycomm {

/// The actions that a RollCall asks its owner for, in order, and whether one of them is that the group fails. The first error wins.
/// Thread: the owner's; no locks.
class RollCallOutput {
 public:
  /// How a frame travels.
  enum class Way {
    Needed, ///< over the bulk link, opened if there is none: an operation cannot go on without it
    BulkLink, ///< the same, but it may be lost: nothing depends on it
    OpenLink, ///< any way that needs no new connection, over control links if need be; it may be lost, too
  };

  struct Action {
    enum class Kind {
      Send, ///< a frame without payload to `peer`
      Fail, ///< the group has failed: `record`
      Overdue, ///< the deadline of operation `op_id` has passed. Again each second until it has ended: a report may be lost
      MaySend, ///< operation `op_id` may be able to send to `peer` now. Protocol adds it, of Credits; the roll call never does
    };
    Kind kind = Kind::Send;
    int peer = -1;
    Way way = Way::Needed;
    uint64_t op_id = 0;
    FrameHeader header;
    ErrorRecord record;
  };

  /// The config outlives this.
  explicit RollCallOutput(const RollCallConfig& config) : config_(config) {}

  void send(int peer, const FrameHeader& header, Way way);
  void overdue(uint64_t op_id);
  /// Nothing counts any more.
  void fail(ErrorRecord record);
  /// The peer broke the protocol with this frame: the group fails.
  void violated(int peer, const FrameHeader& header, const std::string& what);

  [[nodiscard]] bool failed() const noexcept {
    return failed_;
  }
  [[nodiscard]] std::vector<Action> take() {
    return std::exchange(actions_, {});
  }

 private:
  const RollCallConfig& config_;
  std::vector<Action> actions_;
  bool failed_ = false;
};

} // namespace pycomm
