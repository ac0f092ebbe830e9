#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/data/tables.h"
#include "engine/operation/issue_context.h"

namespace pycomm {

/// Finds out which send a receive belongs to, and gives both the same operation id; without I/O. Afterwards they are an ordinary
/// operation of two ranks: matching, credits and execution treat them like any other.
///
/// The sender numbers its messages to each rank, whatever their tags, and the number makes the id. A receive has no id until its
/// message arrives. A message takes the first receive posted that fits its sender and tag. If there is none, the message is unexpected; a
/// receive takes the first unexpected message that fits. All frames of a rank come on one link, and a message is announced when it is begun, so under one tag the k-th send
/// from a to b belongs to the k-th receive from a on b (MPI's rule: messages do not overtake each other). Example, tag 7 on rank 2:
/// recv(any), recv(0) posted; a message from 0 arrives: it goes to recv(any), and recv(0) is for the next one from 0.
///
/// It keeps the receives that wait and the unexpected messages, and counts in the rows of their ranks. An unused tag costs nothing.
/// Thread: the data loop's.
class PointToPoint {
 public:
  static constexpr int kAnyRank = -1;

  /// A send's and its receive's common name.
  struct Name {
    uint64_t id = 0;
    uint32_t index = 0; ///< how many messages its sender had for that rank before, modulo 2^32
  };
  struct Match {
    uint64_t ticket = 0;
    int from = 0;
    Name name;
  };

  /// The tables outlive this.
  explicit PointToPoint(Tables& tables) : tables_(tables) {}

  [[nodiscard]] Name nameSend(int to);
  /// A message between these two has that name, but for kSelfBit. Any other id could be that of another operation here.
  [[nodiscard]] bool isNameOf(int from, int to, Name name) const noexcept;
  /// `ticket` comes back in a Match; tickets rise. `from` may be kAnyRank.
  void postReceive(uint64_t ticket, int from, uint32_t tag);
  /// The first frame of that message has arrived.
  void arrived(int from, uint32_t tag, Name name);
  /// Receives whose message is known now.
  [[nodiscard]] std::vector<Match> takeMatches() {
    return std::exchange(matches_, {});
  }
  /// This rank has named that message to `to` already, so if it is not under way it has ended.
  [[nodiscard]] bool hasSent(int to, uint32_t index) const noexcept;
  /// Tags under which something waits.
  [[nodiscard]] size_t tags() const noexcept {
    return tags_.size();
  }
  /// Receives from `from`, or from kAnyRank itself, that have no message yet.
  [[nodiscard]] size_t waitingFor(int from) const noexcept {
    return from == kAnyRank ? tables_.receives_from_any : tables_.peer(from).receives;
  }
  /// The first receives under a tag that have no message yet: (from, ticket), kAnyRank first.
  [[nodiscard]] std::vector<std::pair<int, uint64_t>> waitingUnder(uint32_t tag) const;

  /// The first receive from `from`, or from kAnyRank itself, under a tag that has no message yet; 0 if there is none.
  [[nodiscard]] uint64_t oldestUnder(uint32_t tag, int from) const noexcept;

  /// A send to oneself and its receive are two operations of one rank, so they cannot share an id: the receive's differs in this bit,
  /// which a frame flips on its way from one to the other.
  static constexpr uint64_t kSelfBit = 1;
  static constexpr uint64_t kAskId = kAskForMessagesId;

 private:
  /// After 2^32 messages an id comes again. The first message of that id has ended long since.
  [[nodiscard]] uint64_t idOf(int from, int to, uint32_t index) const noexcept;

  struct Unexpected {
    uint64_t order; ///< of arrival
    Name name;
  };
  /// What waits under one tag, by sender. No queue is empty.
  struct Tag {
    std::map<int, std::deque<uint64_t>> receives; ///< tickets
    std::map<int, std::deque<Unexpected>> messages;
  };

  [[nodiscard]] size_t& waiting(int from) noexcept {
    return from == kAnyRank ? tables_.receives_from_any : tables_.peer(from).receives;
  }

  Tables& tables_;
  std::unordered_map<uint32_t, Tag> tags_;
  uint64_t unexpected_count_ = 0;
  std::vector<Match> matches_;
};

} // namespace pycomm
