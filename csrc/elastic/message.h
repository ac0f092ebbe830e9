#pragma once

#include <optional>
#include <string>
#include <vector>

#include "elastic/view.h"

namespace pycomm::elastic {

/// What a voter that has ended, or closed, had accepted in its last epoch. It accepts nothing any more.
struct Testament {
  int position = 0; ///< in the view of the message
  std::optional<Accepted> accepted;
  friend bool operator==(const Testament&, const Testament&) = default;
};

/// One message of the agreement. `epoch` and `view` say in which view its sender speaks.
struct Message {
  /// Part of the wire format: never reuse a number.
  enum class Kind : uint8_t {
    Suspect = 1, ///< the epoch has ended, and why; also a question: a process in a later view answers
    Prepare = 2, ///< the proposer asks for promises
    Promise = 3, ///< nothing of the epoch ends well here any more, and no smaller ballot is accepted
    Refuse = 4, ///< a greater ballot was promised
    Accept = 5, ///< the proposer asks to accept `next`
    Accepted = 6,
    Decide = 7, ///< `next` is the next view
    Excluded =
        8, ///< the process that asked is no member of `next`, which is the sender's; `view` is that of the question
    Ping = 9, ///< `nonce` comes back
    Pong = 10,
    Join = 11, ///< a newcomer asks to become a member; `step` says which state it holds, and `view` of which members
    Goodbye = 12, ///< the sender votes no more; `accepted` is what it had accepted, `next` its view
  };
  /// Of a member that is not to be in the next view. Part of the wire format as well.
  enum class Leaving : uint8_t {
    No = 0,
    WithItsStep = 1, ///< in order: it has finished or committed its last step, and stays if that is summed again
    AtOnce = 2, ///< its user has got an error
  };

  Kind kind = Kind::Suspect;
  Incarnation from;
  uint64_t epoch = 0;
  uint64_t view = 0;
  Ballot ballot; ///< Prepare to Accepted; of Refuse, the one that was promised
  uint64_t nonce = 0;
  ErrorCode cause = ErrorCode::Ok; ///< Suspect and Prepare
  std::optional<Incarnation> culprit; ///< Suspect: who seems dead
  StepState step; ///< Promise and Join
  Leaving leaving = Leaving::No; ///< Promise and Goodbye
  MemberSet reach; ///< Promise: which members have answered the sender since the epoch ended
  std::vector<Incarnation> newcomers; ///< Prepare: who may be admitted. Promise: who of them has answered the sender
  std::optional<Accepted> accepted; ///< Promise and Goodbye
  /// Suspect, Prepare, Promise, Refuse and Accept. Of Prepare and Accept: the voters that the ballot does not count.
  std::vector<Testament> testaments;
  std::optional<View> next; ///< Accept, Decide, Excluded, Goodbye

  friend bool operator==(const Message&, const Message&) = default;
};

/// What a process keeps where the processes of its host can read it after its end: the acceptor's memory, and the views that it has
/// seen. A process that reads it, and knows from the kernel that its writer has ended, need not count that voter (Agreement::certified).
struct Record {
  View view;
  std::optional<Accepted> accepted;
  std::vector<View> past; ///< oldest first
  friend bool operator==(const Record&, const Record&) = default;
};

inline constexpr size_t kMaxPast = 8;
inline constexpr size_t kMaxNewcomers = 16;
/// Upper bound of an encoded message: one with the testaments of 255 members.
inline constexpr size_t kMaxMessageNbytes = 2 << 20;

[[nodiscard]] std::string encode(const Message& message);
[[nodiscard]] std::string encode(const Record& record);
/// Accepts any bytes. nullopt if they are no message that encode() writes: lengths, numbers and kinds out of bounds, bytes that are
/// missing or left over, a member twice in a view, fields that the kind does not have.
[[nodiscard]] std::optional<Message> decodeMessage(const std::string& bytes);
[[nodiscard]] std::optional<Record> decodeRecord(const std::string& bytes);

} // namespace pycomm::elastic
