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
#include "base/job_ranks.h"
#include "base/unique_fd.h"
#include "transport/link.h"
#include "transport/net/hello.h"
#include "transport/net/listener.h"
#include "transport/net/socket_link.h"
#include "transport/secure/tls_link.h"

namespace pycomm {

/// A peer that has introduced itself. Its Hello has been read and nothing beyond it.
struct Accepted {
  Hello hello;
  std::unique_ptr<Link> link;
};

/// The identity that a Hello must match.
struct AcceptorConfig {
  uint64_t nonce = 0; ///< for a Unix socket GroupIdentity::unix_nonce
  uint32_t group = 0;
  uint16_t epoch = 0;
  int32_t rank = -1; ///< this process's own rank; a Hello with this rank is refused
  int32_t size = 0;
  JobRanks job; ///< what texts call the ranks
  std::shared_ptr<const TlsContext> tls; ///< null: connections are plain; a Unix socket's are in any case
  std::vector<ProcessId> processes; ///< by rank, with `tls`: a Hello of a rank must come from its process
  bool any_process = false; ///< with `tls`: any process that has the secret may come (Endpoint)
};

/// Turns incoming connections into introduced peers, without blocking and without trusting any of them.
///
/// A connection is read as soon as it is accepted, so a peer whose Hello has arrived takes no slot and does not wait.
/// Other connections are strangers. There are 64 slots for them in a process, and 4 for
/// each of its acceptors in any case; a stranger gets 2 s, and at most 512 bytes of it are read. If all slots are taken, the oldest stranger is dropped at once, so many slow connections cannot lock out a
/// peer. A peer that is dropped in this way retries (see GreetedLink). A stranger costs only a few system calls, so a
/// thousand per second are no load.
///
/// One descriptor is kept in reserve. If the process has no other left, strangers are still read and refused; only a
/// peer that belongs here finds no room. Garbage is dropped without a reply. A pycomm of another version or job gets
/// the reason and nothing else: neither the group nor the host. A peer of this group gets encodeHelloAccepted().
///
/// With a secret, peers speak TLS from their first byte, and are read after it is up; not on a Unix socket, which takes only connections
/// of this user. A pycomm that does not gets the
/// reason in plain; nothing else of a plain connection is answered.
///
/// One thread at a time.
class Acceptor {
 public:
  Acceptor(Listener listener, const AcceptorConfig& config);
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  /// An epoll descriptor that is readable when poll() has something to do. Add it to another epoll set.
  [[nodiscard]] int fd() const noexcept {
    return epoll_.get();
  }
  [[nodiscard]] const SocketAddress& address() const noexcept {
    return listener_.address();
  }

  /// Does all work that is possible now and returns the peers that completed their Hello. Call when fd() is readable or
  /// nextDeadline() has passed. Never throws for anything that came over the network.
  [[nodiscard]] std::vector<Accepted> poll(TimePoint now);

  /// The time of the next poll() if fd() stays silent; TimePoint::max() if none is needed.
  [[nodiscard]] TimePoint nextDeadline() const noexcept;

  /// The reason why no connection can be accepted at the moment (TOO_MANY_FILES …); empty if there is none.
  [[nodiscard]] const std::optional<ErrorRecord>& trouble() const noexcept {
    return trouble_;
  }
  /// The time since which trouble() has been set; TimePoint::max() if it is empty.
  [[nodiscard]] TimePoint troubleSince() const noexcept {
    return trouble_since_;
  }
  /// Number of connections refused so far.
  [[nodiscard]] int64_t rejected() const noexcept {
    return rejected_;
  }

 private:
  struct Stranger {
    UniqueFd fd; ///< until `tls` has it
    std::unique_ptr<TlsLink> tls; ///< once its first byte was one of TLS
    SocketAddress remote;
    TimePoint arrived;
    std::array<std::byte, kHelloNbytes> bytes{};
    size_t nbytes = 0; ///< bytes read into `bytes`
    size_t drained = 0; ///< bytes read and dropped after a refusal
    bool refused = false; ///< the reason has been sent; stays until the peer closes

    [[nodiscard]] int watched() const noexcept {
      return tls != nullptr ? tls->fd() : fd.get();
    }
    [[nodiscard]] bool send(const std::string& reply);
  };
  enum class Verdict : uint8_t { Wait, Introduced, Drop };

  void acceptNew(TimePoint now);
  void keepSpare() noexcept;
  void makeRoom(TimePoint now);
  void dropOldest(TimePoint now);
  std::list<Stranger>::iterator forget(std::list<Stranger>::iterator stranger) noexcept;
  /// True if the stranger is done: introduced or dropped.
  [[nodiscard]] bool serve(Stranger& stranger, TimePoint now);
  void introduce(Stranger& stranger);
  /// The kernel itself carries the bytes of a Unix socket, and says whose process is at the other end.
  [[nodiscard]] bool wantsTls() const noexcept {
    return config_.tls != nullptr && !listener_.address().isUnix();
  }
  [[nodiscard]] Verdict readFirst(Stranger& stranger);
  [[nodiscard]] Verdict readTls(Stranger& stranger);
  [[nodiscard]] Verdict judge(Stranger& stranger);
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
  std::vector<Accepted> accepted_; ///< result of the current poll()
  bool listening_ = false;
  TimePoint listen_again_ = TimePoint::max(); ///< the end of a pause in accepting
  std::string why_dropped_; ///< the reason for dropping the current stranger
  bool harmless_ = false; ///< it only closed again: a health check, or a peer whose job ended meanwhile
  UniqueFd spare_; ///< closed to make room for one stranger
  std::optional<ErrorRecord> trouble_;
  TimePoint trouble_since_ = TimePoint::max();
  int64_t rejected_ = 0;
  std::array<TimePoint, 2> last_log_{}; ///< for harmless strangers and for others: both are rate-limited separately
  int64_t unlogged_ = 0; ///< refused since the last log line
};

} // namespace pycomm
