#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/abort_token.h"
#include "base/buffer_view.h"
#include "base/deadline.h"

namespace pycomm {

/// The result of one tryRead or tryWrite.
struct Progress {
  size_t nbytes = 0;
  bool would_block = false; ///< the kernel has no room, or nothing has arrived
  bool closed = false; ///< reads only: the peer ended its side in order
};

/// A connected, reliable, ordered, full-duplex byte stream to one peer.
///
/// There are two ways to use it. `tryWrite`/`tryRead` never block and belong to the data loop that owns the link; the
/// blocking forms are for handshakes and tests. One thread at a time may read and one may write; of a
/// TlsLink, one thread may use it. Failures throw Error(ConnectionReset), with errno's name in `cause`, and a TlsLink's also
/// Error(DataCorrupt); the caller adds the ranks and the operation.
class Link {
 public:
  virtual ~Link() = default;

  /// The descriptor to poll before the next tryRead, tryWrite or finishConnect. Owned by the link. A finishConnect() may change it.
  [[nodiscard]] virtual int fd() const noexcept = 0;

  /// The event to poll for on fd() before the next tryWrite() or finishConnect().
  [[nodiscard]] virtual short roomEvent() const noexcept {
    return POLLOUT;
  }
  /// True if tryRead() makes no system call while bytes are available. Then reading ahead gains nothing.
  [[nodiscard]] virtual bool readsAreCheap() const noexcept {
    return false;
  }
  /// True if a try would move nothing now; makes no system call. If a link can return true, its owner checks again
  /// before it sleeps: see SharedLink.
  [[nodiscard]] virtual bool knownEmpty() const noexcept {
    return false;
  }
  [[nodiscard]] virtual bool knownFull() const noexcept {
    return false;
  }

  /// A tryRead() has something to do although fd() may not be readable: the bytes have been taken from the kernel. The owner looks
  /// again before it sleeps. In TLS these may be bytes of no message, such as a new key: the read then would block, and this is false.
  [[nodiscard]] virtual bool buffered() const noexcept {
    return false;
  }
  /// The kernel has not taken all that tryWrite() has: tryWrite() of nothing goes on, when fd() has room.
  [[nodiscard]] virtual bool unsent() const noexcept {
    return false;
  }

  /// Writes from up to `count` views in order, as one system call. Partial writes are normal.
  [[nodiscard]] virtual Progress tryWrite(const ConstBufferView* views, size_t count) = 0;
  [[nodiscard]] virtual Progress tryRead(BufferView into) = 0;

  /// Ends the write side: the peer reads to the end and then sees `closed`. While unsent() is true, bytes must still be sent.
  virtual void shutdownWrite() noexcept = 0;

  /// Call it after EPOLLHUP or EPOLLERR on fd(), for an end that only writes: it reads and discards what is left. Returns false if the peer
  /// closed in order, which a Unix socket reports at once and TCP does not, and true if the connection broke. False says that the peer has read
  /// everything, except of shared memory: what is in its ring may be unread.
  [[nodiscard]] virtual bool isReset() noexcept;

  /// For a link that is still connecting: returns true once it is connected. Throws Error(ConnectFailed); the link is
  /// unusable then.
  [[nodiscard]] virtual bool finishConnect() {
    return true;
  }

  /// Closes without losing bytes that the kernel has taken: ends the write side, then reads and drops bytes until the peer closes too, for
  /// at most kGoodbye.
  virtual void closeGently() noexcept;

  /// "10.0.0.1:29600 -> 10.0.0.2:29601", for error texts.
  [[nodiscard]] virtual std::string describe() const = 0;
};

/// Waits until finishConnect() returns true. Returns false at the deadline; it may be called again after that. Throws
/// what finishConnect() throws, and the token's reason when aborted.
[[nodiscard]] bool waitConnected(Link& link, Deadline deadline, const AbortToken& abort);

/// Moves exactly the view's bytes, or throws: Error(Timeout) at the deadline, the token's reason when aborted,
/// Error(ConnectionReset) if the peer closes early.
void writeAll(Link& link, ConstBufferView bytes, Deadline deadline, const AbortToken& abort);
void readAll(Link& link, BufferView into, Deadline deadline, const AbortToken& abort);

/// How long a side that ends a link waits for its peer to read what was said before.
inline constexpr std::chrono::milliseconds kGoodbye(20);

/// closeGently() for several links at once: kGoodbye for all of them together.
void closeAllGently(const std::vector<std::unique_ptr<Link>>& links) noexcept;

} // namespace pycomm
