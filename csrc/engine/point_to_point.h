#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

namespace pycomm {

/// Finds out which send a receive belongs to, and gives both the same operation id; without I/O. Afterwards they are an ordinary
/// operation of two ranks: matching, credits and execution treat them like any other.
///
/// The k-th send from a to b under a tag belongs to the k-th receive from a under that tag on b, whatever order the bytes arrive in.
/// A receive from any rank takes the message that was heard of first; receives under one tag are served in the order in which they
/// were posted, so a later receive from a certain rank waits until an earlier one from any rank has its message (MPI's rule: messages
/// do not overtake each other). Example, tag 7 on rank 2: recv(any), recv(0) posted; a message from 0 is heard of: it goes to
/// recv(any), and recv(0) is for the next one from 0.
///
/// Thread: the lane's.
class PointToPoint {
 public:
  static constexpr int kAnyRank = -1;

  /// A send's and its receive's common name.
  struct Name {
    uint64_t id = 0;
    uint32_t index = 0; ///< how many came before it under its tag between its ranks, modulo 2^32
  };
  struct Match {
    uint64_t ticket = 0;
    int from = 0;
    Name name;
  };

  PointToPoint(int rank, int size, uint32_t group) : rank_(rank), size_(size), group_(group) {}

  [[nodiscard]] Name nameSend(int to, uint32_t tag);
  /// `ticket` comes back in a Match; `from` may be kAnyRank.
  void postReceive(uint64_t ticket, int from, uint32_t tag);
  /// A frame of that send has arrived.
  void heard(int from, uint32_t tag, uint32_t index);
  /// Receives whose sender is known now, in the order in which they were posted under their tags.
  [[nodiscard]] std::vector<Match> takeMatches() {
    return std::exchange(matches_, {});
  }
  /// Whether a frame about this message is late: it was named here before. `sending`: this rank is the sender.
  [[nodiscard]] bool isPast(bool sending, int peer, uint32_t tag, uint32_t index) const;

  /// A send to oneself and its receive are two operations of one rank, so they cannot share an id: the receive's differs in this bit,
  /// which a frame flips on its way from one to the other.
  static constexpr uint64_t kSelfBit = 1;

 private:
  using Edge = std::pair<int, uint32_t>; ///< peer, tag
  struct Posted {
    uint64_t ticket;
    int from;
  };

  [[nodiscard]] Name name(int from, int to, uint32_t tag, uint64_t count) const;
  void serve(uint32_t tag);
  /// The rank whose next message under `tag` was heard of first; kAnyRank if none was.
  [[nodiscard]] int firstHeard(uint32_t tag) const;

  const int rank_;
  const int size_;
  const uint32_t group_;
  std::map<Edge, uint64_t> sends_; ///< named so far
  std::map<Edge, uint64_t> receives_;
  std::map<uint32_t, std::deque<Posted>> posted_; ///< by tag: receives without a sender yet; never an empty queue
  std::map<std::tuple<uint32_t, int, uint32_t>, uint64_t> heard_; ///< tag, sender, index -> order of hearing
  uint64_t heard_count_ = 0;
  std::vector<Match> matches_;
};

} // namespace pycomm
