#pragma once

#include <poll.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/abort_token.h"
#include "base/buffer_view.h"
#include "base/deadline.h"

namespace pycomm {

/// What one try moved.
struct Progress {
  size_t nbytes = 0;
  bool would_block = false; ///< the kernel has no room, or nothing has arrived
  bool closed = false; ///< reads only: the peer ended its side in order
};

/// A connected, reliable, ordered, full-duplex byte stream to one peer.
///
/// Two ways of use: `tryWrite`/`tryRead` never block and belong to the lane that owns the link; the blocking forms are
/// for handshakes and tests. One thread at a time may read and one may write. Failures throw Error(ConnectionReset),
/// with errno's name in `cause`; the caller adds who and where.
class Link {
 public:
  virtual ~Link() = default;

  /// What epoll waits on. Owned by the link.
  [[nodiscard]] virtual int fd() const noexcept = 0;
  /// What epoll waits on before the next tryRead, tryWrite or finishConnect; a try may change it.
  [[nodiscard]] virtual int readFd() const noexcept {
    return fd();
  }
  [[nodiscard]] virtual int writeFd() const noexcept {
    return fd();
  }

  /// What writeFd() is polled for by who waits for room, or for finishConnect().
  [[nodiscard]] virtual short roomEvent() const noexcept {
    return POLLOUT;
  }
  /// A tryRead() costs no system call where something has arrived: nothing is gained by reading more than is needed now.
  [[nodiscard]] virtual bool readsAreCheap() const noexcept {
    return false;
  }
  /// It is known without a system call that a try would move nothing now. The owner of a link that may say so looks again before it
  /// sleeps: see SharedLink.
  [[nodiscard]] virtual bool knownEmpty() const noexcept {
    return false;
  }
  [[nodiscard]] virtual bool knownFull() const noexcept {
    return false;
  }

  /// Writes from up to `count` views in order, as one system call. Partial writes are normal.
  [[nodiscard]] virtual Progress tryWrite(const ConstBufferView* views, size_t count) = 0;
  [[nodiscard]] virtual Progress tryRead(BufferView into) = 0;

  /// Ends the write side: the peer reads to the end and then sees `closed`.
  virtual void shutdownWrite() noexcept = 0;

  /// For a link that is still being made: true once connected. Throws Error(ConnectFailed); the link is of no use then.
  [[nodiscard]] virtual bool finishConnect() {
    return true;
  }

  /// Closing without losing what is queued: ends the write side, then reads and drops until the peer closes too or 20 ms.
  virtual void closeGently() noexcept;

  /// Of a link of several connections: the interface of the one that the next byte comes by, or leaves by. Where that one has gone
  /// silent, all others wait for it. Empty for a link of one connection.
  [[nodiscard]] virtual std::string readsFrom() const {
    return "";
  }
  [[nodiscard]] virtual std::string writesTo() const {
    return "";
  }

  /// "10.0.0.1:29600 -> 10.0.0.2:29601", for messages.
  [[nodiscard]] virtual std::string describe() const = 0;
};

/// Waits until finishConnect() says true; false at the deadline, after which it may be called again. Throws what that throws, and the
/// token's reason when aborted.
[[nodiscard]] bool waitConnected(Link& link, Deadline deadline, const AbortToken& abort);

/// Moves exactly the view's bytes, or throws: Error(Timeout) at the deadline, the token's reason when aborted,
/// Error(ConnectionReset) when the peer closes early.
void writeAll(Link& link, ConstBufferView bytes, Deadline deadline, const AbortToken& abort);
void readAll(Link& link, BufferView into, Deadline deadline, const AbortToken& abort);

/// closeGently() of several links at once: 20 ms for all of them together.
void closeAllGently(const std::vector<std::unique_ptr<Link>>& links) noexcept;

} // namespace pycomm
