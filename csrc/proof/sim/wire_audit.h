#pragma once

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/data/tables.h"
#include "proof/sim/digest.h"
#include "proof/sim/network.h"

namespace pycomm::sim {

/// Checks flow control from outside, from the frames alone: no rank may send bytes that it was not granted room for.
class WireAudit final : public Network::Observer {
 public:
  static constexpr size_t kTimeNchars = 15; ///< length of the time in a line of the trace: "%10d us  "

  WireAudit(Timeline& timeline, int ranks, const Limits& limits, bool keeps_trace);

  void frameSent(int from, int to, LinkPurpose purpose, const FrameHeader& header) override;
  void payloadSent(int from, int to, LinkPurpose purpose, ConstBufferView bytes) override;
  void frameArrived(int from, int to, LinkPurpose purpose, const FrameHeader& header) override;
  void linkChanged(int from, int to, LinkPurpose purpose, const char* what) override;

  /// Sets a listener that gets the number of frames sent so far.
  void onFrame(std::function<void(int64_t)> listener) {
    on_frame_ = std::move(listener);
  }
  void say(const std::string& line);

  [[nodiscard]] const std::vector<std::string>& trace() const noexcept {
    return trace_;
  }
  [[nodiscard]] const std::vector<std::string>& violations() const noexcept {
    return violations_;
  }
  [[nodiscard]] int64_t frames() const noexcept {
    return frames_;
  }
  /// Of every frame on the wire: its time, its whole header and its payload.
  [[nodiscard]] uint64_t digest() const noexcept {
    return digest_.value();
  }

 private:
  struct Edge {
    int64_t limit = 0;
    int64_t sent = 0;
    uint32_t frames = 0;
  };
  [[nodiscard]] Edge& edge(int from, int to, uint64_t op_id) {
    return edges_[op_id << 16 | static_cast<uint64_t>(from) << 8 | static_cast<uint64_t>(to)];
  }
  enum class Event : uint8_t { Sent, Payload, Arrived };
  void digestEvent(Event event, int from, int to, LinkPurpose purpose);
  void note(const char* verb, int from, int to, LinkPurpose purpose, const FrameHeader& header);
  void violation(int from, int to, const FrameHeader& header, const std::string& what);

  Timeline& timeline_; ///< the run's
  const int ranks_;
  const Limits limits_;
  const bool keeps_trace_;
  std::unordered_map<uint64_t, Edge> edges_; ///< for look-ups only: its order is not deterministic
  std::vector<int64_t> in_pool_; ///< per (from, to): eager bytes that `to` has not credited back, as `from` knows
  int64_t frames_ = 0;
  Digest digest_;
  std::function<void(int64_t)> on_frame_;
  std::vector<std::string> trace_;
  std::vector<std::string> violations_;
};

} // namespace pycomm::sim
