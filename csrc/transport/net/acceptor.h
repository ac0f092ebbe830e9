#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/unique_fd.h"
#include "transport/link.h"
#include "transport/net/hello.h"
#include "transport/net/listener.h"
#include "transport/net/tcp_link.h"

namespace pycomm {

/// A peer that said who it is. Its Hello has been read and nothing beyond it.
struct Accepted {
  Hello hello;
  std::unique_ptr<Link> link;
};

/// Which peers belong here.
struct AcceptorConfig {
  uint64_t nonce = 0;
  uint32_t group = 0;
  uint16_t epoch = 0;
  int32_t rank = -1; ///< this process's own: nobody else has it
  int32_t size = 0;
  TcpOptions tcp;
};

/// Turns incoming connections into introduced peers without ever blocking and without trusting anybody.
///
/// A connection is read as soon as it is accepted, so a peer whose Hello has come takes no place and waits for nobody. The others get a
/// place, 2 s, and at most 512 bytes are read from one. There are 64 places: if all are taken, the oldest stranger gives way at once, so a
/// crowd of slow connections cannot keep a peer out. A peer that is dropped so tries again (see GreetedLink). A stranger costs a
/// handful of system calls, so that a thousand a second are no load.
/// One descriptor is kept in reserve: if the process has no other left, strangers are still heard and sent away, and
/// only a peer that comes to stay finds no room. Garbage is dropped without an answer; a pycomm of another version or job is told why,
/// and nothing else: neither the group nor the host. A peer of this group is sent encodeHelloAccepted().
/// One thread at a time.
class Acceptor {
 public:
  Acceptor(Listener listener, const AcceptorConfig& config);
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  /// An epoll descriptor that is readable when poll() has something to do. Put it into another epoll set.
  [[nodiscard]] int fd() const noexcept {
    return epoll_.get();
  }
  [[nodiscard]] const SocketAddress& address() const noexcept {
    return listener_.address();
  }

  /// Does what can be done now and returns the peers that completed their Hello. Call when fd() is readable or
  /// nextDeadline() has passed. Never throws for anything that came over the network.
  [[nodiscard]] std::vector<Accepted> poll(TimePoint now);

  /// When poll() is due even though fd() is silent. TimePoint::max() if never.
  [[nodiscard]] TimePoint nextDeadline() const noexcept;

  /// Why no connection can be accepted at the moment (TOO_MANY_FILES …); empty when all is well.
  [[nodiscard]] const std::optional<ErrorRecord>& trouble() const noexcept {
    return trouble_;
  }
  /// Since when trouble() holds on; TimePoint::max() when all is well.
  [[nodiscard]] TimePoint troubleSince() const noexcept {
    return trouble_since_;
  }
  /// Connections turned away so far.
  [[nodiscard]] int64_t rejected() const noexcept {
    return rejected_;
  }

 private:
  struct Stranger {
    UniqueFd fd;
    SocketAddress remote;
    TimePoint arrived;
    std::array<std::byte, kHelloNbytes> bytes{};
    size_t nbytes = 0; ///< of `bytes`
    size_t drained = 0; ///< read and thrown away after a refusal
    bool refused = false; ///< the reason is sent; stays until the peer hangs up
  };
  enum class Verdict : uint8_t { Wait, Introduced, Drop };

  void acceptNew(TimePoint now);
  void keepSpare() noexcept;
  void makeRoom(TimePoint now);
  /// True if the stranger is through: it was introduced, or given up.
  [[nodiscard]] bool serve(Stranger& stranger, TimePoint now);
  void introduce(Stranger& stranger);
  [[nodiscard]] Verdict hear(Stranger& stranger);
  [[nodiscard]] Verdict drain(Stranger& stranger);
  [[nodiscard]] Verdict refuse(Stranger& stranger, ErrorCode code, const std::string& why);
  void reject(const Stranger& stranger, TimePoint now);
  [[nodiscard]] Verdict giveUp(std::string why, bool harmless = false);
  void pauseUntil(TimePoint instant);
  void listen(bool on);

  Listener listener_;
  AcceptorConfig config_;
  UniqueFd epoll_;
  std::list<Stranger> strangers_; ///< oldest first, at most kMaxStrangers
  std::vector<Accepted> accepted_; ///< by the poll() under way
  bool listening_ = false;
  TimePoint listen_again_ = TimePoint::max(); ///< when a pause in accepting ends
  std::string why_dropped_; ///< of the stranger that is being given up
  bool harmless_ = false; ///< it only left again: a health check, or a peer whose job ended meanwhile
  UniqueFd spare_; ///< closed to make room for one stranger
  std::optional<ErrorRecord> trouble_;
  TimePoint trouble_since_ = TimePoint::max();
  int64_t rejected_ = 0;
  std::array<TimePoint, 2> last_log_{}; ///< of a harmless one, and of others: the first must not silence the second
  int64_t unlogged_ = 0; ///< turned away since then
};

} // namespace pycomm
