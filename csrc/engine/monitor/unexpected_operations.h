#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "engine/operation/descriptor.h"

namespace pycomm {

/// Unexpected operations: frames of other ranks have arrived for them, and they are not entered here. Each rank's descriptor is kept until this
/// rank enters the operation and compares it.
///
/// Of each peer, so many collectives are kept as there are places for, and as many messages. The caller asks hasPlace() where a peer
/// chooses how many it sends; data keeps to the bound by itself.
/// Thread: the RollCall's owner's.
class UnexpectedOperations {
 public:
  struct Entry {
    std::map<int, Descriptor> ranks; ///< the lowest that differs is named
    TimePoint since; ///< when the first frame arrived
    TimePoint last; ///< when the last one did
    std::set<int> refused; ///< ranks that were answered that it is not entered here
    std::set<int> answered_late; ///< ranks that RollCall::standOff has answered since they last asked
    std::map<int, uint64_t> origins; ///< CallbackOrigin, of ranks that have asked
    [[nodiscard]] uint64_t originOf(int peer) const {
      const auto found = origins.find(peer);
      return found == origins.end() ? 0 : found->second;
    }
  };

  UnexpectedOperations(size_t places, int size) : places_(places), peers_(static_cast<size_t>(size)) {}

  /// Keeps what a peer said of an operation; false if the peer contradicts what it said before.
  [[nodiscard]] bool add(int peer, uint64_t op_id, const Descriptor& theirs, TimePoint now);
  /// The operation is entered here now, or was: it is not kept any more.
  [[nodiscard]] Entry take(uint64_t op_id);
  /// A peer was answered that the operation, which is kept, is not entered here.
  void refused(int peer, uint64_t op_id) {
    entries_.at(op_id).refused.insert(peer);
  }
  /// A peer's question about the operation, which is kept, says which callback issued it there (CallbackOrigin).
  void issuedIn(int peer, uint64_t op_id, uint64_t origin) {
    if (origin != 0) {
      entries_.at(op_id).origins[peer] = origin;
    }
  }
  /// This rank asks that peer for messages: each question may bring one more than fits.
  void askedForMessages(int peer) {
    ++peers_[static_cast<size_t>(peer)].asked;
  }

  [[nodiscard]] bool hasPlace(int peer, uint64_t op_id, bool message) const;
  [[nodiscard]] bool has(uint64_t op_id) const {
    return entries_.count(op_id) != 0;
  }
  /// Frames of this peer's have arrived for it.
  [[nodiscard]] bool has(uint64_t op_id, int peer) const {
    const auto found = entries_.find(op_id);
    return found != entries_.end() && found->second.ranks.count(peer) != 0;
  }
  /// The ranks whose frames of it have arrived.
  [[nodiscard]] std::vector<int> ranks(uint64_t op_id) const;
  [[nodiscard]] size_t size() const noexcept {
    return entries_.size();
  }
  /// By all peers; one operation may take several.
  [[nodiscard]] size_t placesTaken() const noexcept;
  /// Calls visit(op_id, entry, descriptor) for each operation of which this peer's frames have arrived, until it returns false.
  template <typename Visit>
  void forEachOf(int peer, const Visit& visit) {
    for (auto& entry : entries_) {
      const auto theirs = entry.second.ranks.find(peer);
      if (theirs != entry.second.ranks.end() && !visit(entry.first, entry.second, theirs->second)) {
        return;
      }
    }
  }

 private:
  struct Peer {
    size_t collectives = 0; ///< entries of entries_ that it is in
    size_t messages = 0; ///< the same of messages, which have places of their own
    size_t asked = 0; ///< see askedForMessages()
    [[nodiscard]] size_t& count(bool message) noexcept {
      return message ? messages : collectives;
    }
  };

  const size_t places_;
  std::unordered_map<uint64_t, Entry> entries_;
  std::vector<Peer> peers_;
};

} // namespace pycomm
