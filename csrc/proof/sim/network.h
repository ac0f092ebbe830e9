#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "proof/sim/frame_cutter.h"
#include "proof/sim/random.h"
#include "proof/sim/sim_loop.h"
#include "proof/sim/timeline.h"
#include "transport/link.h"
#include "transport/net/hello.h"

namespace pycomm::sim {

/// Connections in virtual time. Each direction is a first-in-first-out stream of bytes with a delay and with limited
/// room for unread bytes. Different connections overtake each other. The end of a connection behaves as with sockets.
/// An orderly end follows the bytes. An end with unread bytes, or bytes for a closed socket, cause a reset, which may
/// lose bytes in flight.
class Network final : public Readiness {
 public:
  struct Weather {
    Nanos latency_low = microseconds(20);
    Nanos latency_high = microseconds(200);
    int64_t room_low = 256; ///< bytes per direction
    int64_t room_high = 16384;
    int short_write_percent = 20; ///< share of writes that are cut short although there is room
    double nanos_per_byte = 0;
  };
  /// Called for each frame when the sender's kernel has taken its header, and when the header has reached the
  /// receiver's kernel.
  class Observer {
   public:
    virtual ~Observer() = default;
    virtual void frameSent(int from, int to, LinkPurpose purpose, const FrameHeader& header) = 0;
    /// Bytes of the payload of the frame that was sent last in that direction of a link: its sender's kernel has taken them.
    virtual void payloadSent(int from, int to, LinkPurpose purpose, ConstBufferView bytes) = 0;
    virtual void frameArrived(int from, int to, LinkPurpose purpose, const FrameHeader& header) = 0;
    virtual void linkChanged(int from, int to, LinkPurpose purpose, const char* what) = 0;
  };
  using Listener = std::function<void(std::unique_ptr<Link>)>;

  /// Descriptors count from `first_fd`, which is even: one loop may serve several networks.
  Network(Timeline& timeline, Random random, int ranks, const Weather& weather, int first_fd = 0);

  void setObserver(Observer* observer) noexcept {
    observer_ = observer;
  }
  /// Sets the receiver of connections to `rank`; null: they are refused.
  void listen(int rank, Listener listener) {
    listeners_[static_cast<size_t>(rank)] = std::move(listener);
  }
  /// Starts to connect.
  [[nodiscard]] std::unique_ptr<Link> connect(int from, int to);
  /// Both ends of an existing connection: control links at the beginning of a run.
  [[nodiscard]] std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> pair(int a, int b);

  // ---- faults
  /// Delays all bytes from `from` to `to` until then, as TCP would, and the acknowledgements of the other direction.
  void block(int from, int to, TimePoint until);
  /// A reset in the network ends the connections that `from` has opened to `to`, at both ends. False if there is none.
  bool resetConnections(int from, int to);
  /// Closes all connections of the process of `rank`, as its kernel would, and refuses new ones.
  void closeAllOf(int rank);

  // Readiness
  void setWatcher(int fd, SimLoop* loop) override;
  [[nodiscard]] uint32_t eventsOf(int fd) const override;

 private:
  friend class SimLink;

  struct Pipe {
    std::vector<std::byte> bytes; ///< [base, written) of the stream
    int64_t base = 0;
    int64_t written = 0;
    int64_t arrived = 0;
    int64_t read = 0;
    int64_t acknowledged = 0; ///< bytes that the writer knows to be read
    int64_t room = 0;
    bool fin = false; ///< the writer has ended its side
    bool fin_arrived = false;
    bool lost = false; ///< a reset has lost the remaining bytes
    TimePoint last_arrival{};
    FrameCutter sent;
    FrameCutter received;
  };
  struct End {
    int rank = -1;
    int peer = -1;
    bool connected = false;
    bool refused = false;
    bool reset = false;
    bool closed = false;
    bool drains = false; ///< closing gently: arriving bytes are dropped
    SimLoop* watcher = nullptr;
  };
  struct Connection {
    LinkPurpose purpose = LinkPurpose::Bulk;
    End ends[2];
    Pipe pipes[2]; ///< pipes[i] is written by ends[i]
  };

  [[nodiscard]] Connection& connectionOf(int fd) const {
    return *connections_[static_cast<size_t>((fd - first_fd_) / 2)];
  }
  [[nodiscard]] End& end(int fd) const {
    return connectionOf(fd).ends[fd % 2];
  }
  [[nodiscard]] Pipe& out(int fd) const {
    return connectionOf(fd).pipes[fd % 2];
  }
  [[nodiscard]] Pipe& in(int fd) const {
    return connectionOf(fd).pipes[1 - fd % 2];
  }
  [[nodiscard]] int makeConnection(int from, int to, LinkPurpose purpose);
  [[nodiscard]] Progress write(int fd, const ConstBufferView* views, size_t count);
  [[nodiscard]] Progress read(int fd, BufferView into);
  void shutdown(int fd);
  void close(int fd);
  void drainAndClose(int fd);
  void deliver(int fd, int64_t upto, bool fin);
  void acknowledge(int fd, int64_t upto);
  void sendReset(int fd);
  void becomeReset(int fd);
  void changed(int fd);
  /// The arrival time of a byte sent now; TimePoint::max() if it never arrives.
  [[nodiscard]] TimePoint arrival(int from, int to);
  [[nodiscard]] TimePoint& blockedUntil(int from, int to) {
    return blocked_[static_cast<size_t>(from * ranks_ + to)];
  }
  void finishAccept(int fd);

  Timeline& timeline_; ///< the run's, which outlives this network
  Random random_;
  const int ranks_;
  const Weather weather_;
  const int first_fd_;
  Observer* observer_ = nullptr; ///< the run's
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<Listener> listeners_;
  std::vector<TimePoint> blocked_; ///< one per (from, to)
  std::vector<bool> dead_;
};

} // namespace pycomm::sim
