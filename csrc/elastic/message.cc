#include "elastic/message.h"

#include <algorithm>
#include <limits>
#include <string_view>

namespace pycomm::elastic {
namespace {

constexpr uint8_t kVersion = 1;

// Which optional fields each kind has. Others are not on the wire.
enum Field : unsigned {
  kBallot = 1 << 0,
  kNonce = 1 << 1,
  kCause = 1 << 2,
  kCulprit = 1 << 3,
  kStep = 1 << 4,
  kReach = 1 << 5,
  kNewcomers = 1 << 6,
  kAccepted = 1 << 7,
  kTestaments = 1 << 8,
  kNext = 1 << 9,
  kLeaving = 1 << 10,
};

unsigned fieldsOf(Message::Kind kind) noexcept {
  switch (kind) {
    case Message::Kind::Suspect:
      return kCause | kCulprit | kTestaments;
    case Message::Kind::Prepare:
      return kBallot | kCause | kNewcomers | kTestaments;
    case Message::Kind::Promise:
      return kBallot | kStep | kLeaving | kReach | kNewcomers | kAccepted | kTestaments;
    case Message::Kind::Refuse:
      return kBallot | kTestaments;
    case Message::Kind::Accept:
      return kBallot | kTestaments | kNext;
    case Message::Kind::Accepted:
      return kBallot;
    case Message::Kind::Decide:
    case Message::Kind::Excluded:
      return kNext;
    case Message::Kind::Ping:
    case Message::Kind::Pong:
      return kNonce;
    case Message::Kind::Join:
      return kStep;
    case Message::Kind::Goodbye:
      return kLeaving | kAccepted | kNext;
  }
  return 0;
}

/// Little-endian, whatever the machine: two hosts of one group may differ.
class Writer {
 public:
  void number(uint64_t value, int nbytes) {
    for (int i = 0; i < nbytes; ++i) {
      out_.push_back(static_cast<char>(value >> (8 * i)));
    }
  }
  void incarnation(const Incarnation& value) {
    number(value.high, 8);
    number(value.low, 8);
  }
  void set(const MemberSet& value) {
    uint8_t byte = 0;
    for (size_t i = 0; i < kMaxMembers; ++i) {
      byte = static_cast<uint8_t>(byte | (value.test(i) ? 1U << (i % 8) : 0U));
      if (i % 8 == 7) {
        number(byte, 1);
        byte = 0;
      }
    }
  }
  void view(const View& value) {
    number(value.epoch, 8);
    number(value.parent, 8);
    number(static_cast<uint64_t>(value.step), 8);
    number(static_cast<uint64_t>(value.cause), 2);
    set(value.left);
    number(value.members.size(), 2);
    for (const Incarnation& member : value.members) {
      incarnation(member);
    }
  }
  void accepted(const std::optional<Accepted>& value) {
    number(value ? 1 : 0, 1);
    if (value) {
      number(value->ballot.number(), 8);
      view(value->next);
    }
  }
  [[nodiscard]] std::string take() {
    return std::move(out_);
  }

 private:
  std::string out_;
};

class Reader {
 public:
  explicit Reader(std::string_view in) : in_(in) {}

  uint64_t number(int nbytes, uint64_t most = std::numeric_limits<uint64_t>::max()) {
    if (!ok_ || in_.size() < static_cast<size_t>(nbytes)) {
      ok_ = false;
      return 0;
    }
    uint64_t value = 0;
    for (int i = 0; i < nbytes; ++i) {
      value |= static_cast<uint64_t>(static_cast<unsigned char>(in_[static_cast<size_t>(i)])) << (8 * i);
    }
    in_.remove_prefix(static_cast<size_t>(nbytes));
    ok_ = value <= most;
    return ok_ ? value : 0;
  }
  bool flag() {
    return number(1, 1) == 1;
  }
  int64_t step() {
    return static_cast<int64_t>(number(8, static_cast<uint64_t>(std::numeric_limits<int64_t>::max() - 1)));
  }
  ErrorCode cause() {
    const auto code = static_cast<ErrorCode>(number(2));
    ok_ = ok_ && std::string_view(errorCodeName(code)) != "UNKNOWN";
    return code;
  }
  Incarnation incarnation() {
    Incarnation value;
    value.high = number(8);
    value.low = number(8);
    return value;
  }
  std::vector<Incarnation> incarnations(size_t most) {
    const size_t count = number(2, most);
    std::vector<Incarnation> found;
    if (in_.size() / 16 >= count) { // else memory would be asked for that the bytes do not fill
      found.reserve(count);
    }
    for (size_t i = 0; i < count && ok_; ++i) {
      found.push_back(incarnation());
      ok_ = ok_ && std::find(found.begin(), found.end() - 1, found.back()) == found.end() - 1;
    }
    return found;
  }
  MemberSet set() {
    MemberSet value;
    for (size_t i = 0; i < kMaxMembers; i += 8) {
      const uint64_t byte = number(1);
      for (size_t bit = 0; bit < 8; ++bit) {
        value.set(i + bit, (byte >> bit & 1) != 0);
      }
    }
    return value;
  }
  View view() {
    View value;
    value.epoch = number(8, std::numeric_limits<uint64_t>::max() - 1);
    value.parent = number(8);
    value.step = step();
    value.cause = cause();
    value.left = set();
    value.members = incarnations(kMaxMembers);
    return value;
  }
  std::optional<Accepted> accepted() {
    if (!flag()) {
      return std::nullopt;
    }
    Accepted value;
    value.ballot = Ballot::of(number(8));
    value.next = view();
    ok_ = ok_ && value.ballot.given();
    return value;
  }
  void fail() noexcept {
    ok_ = false;
  }
  [[nodiscard]] bool ok() const noexcept {
    return ok_;
  }
  [[nodiscard]] bool complete() const noexcept {
    return ok_ && in_.empty();
  }

 private:
  std::string_view in_;
  bool ok_ = true;
};

} // namespace

std::string encode(const Message& message) {
  const unsigned fields = fieldsOf(message.kind);
  Writer out;
  out.number(kVersion, 1);
  out.number(static_cast<uint64_t>(message.kind), 1);
  out.incarnation(message.from);
  out.number(message.epoch, 8);
  out.number(message.view, 8);
  if ((fields & kBallot) != 0) {
    out.number(message.ballot.number(), 8);
  }
  if ((fields & kNonce) != 0) {
    out.number(message.nonce, 8);
  }
  if ((fields & kCause) != 0) {
    out.number(static_cast<uint64_t>(message.cause), 2);
  }
  if ((fields & kCulprit) != 0) {
    out.number(message.culprit ? 1 : 0, 1);
    if (message.culprit) {
      out.incarnation(*message.culprit);
    }
  }
  if ((fields & kStep) != 0) {
    out.number(static_cast<uint64_t>(message.step.committed), 8);
    out.number(message.step.launched ? 1 : 0, 1);
    out.number(message.step.finished ? 1 : 0, 1);
  }
  if ((fields & kLeaving) != 0) {
    out.number(static_cast<uint64_t>(message.leaving), 1);
  }
  if ((fields & kReach) != 0) {
    out.set(message.reach);
  }
  if ((fields & kNewcomers) != 0) {
    out.number(message.newcomers.size(), 2);
    for (const Incarnation& newcomer : message.newcomers) {
      out.incarnation(newcomer);
    }
  }
  if ((fields & kAccepted) != 0) {
    out.accepted(message.accepted);
  }
  if ((fields & kTestaments) != 0) {
    out.number(message.testaments.size(), 2);
    for (const Testament& testament : message.testaments) {
      out.number(static_cast<uint64_t>(testament.position), 2);
      out.accepted(testament.accepted);
    }
  }
  if ((fields & kNext) != 0) {
    out.view(message.next.value());
  }
  return out.take();
}

std::optional<Message> decodeMessage(const std::string& bytes) {
  if (bytes.size() > kMaxMessageNbytes) {
    return std::nullopt;
  }
  Reader in(bytes);
  if (in.number(1) != kVersion) {
    return std::nullopt;
  }
  Message message;
  message.kind = static_cast<Message::Kind>(in.number(1, static_cast<uint64_t>(Message::Kind::Goodbye)));
  const unsigned fields = fieldsOf(message.kind);
  if (fields == 0) {
    return std::nullopt;
  }
  message.from = in.incarnation();
  message.epoch = in.number(8, std::numeric_limits<uint64_t>::max() - 1);
  message.view = in.number(8);
  if ((fields & kBallot) != 0) {
    message.ballot = Ballot::of(in.number(8));
  }
  if ((fields & kNonce) != 0) {
    message.nonce = in.number(8);
  }
  if ((fields & kCause) != 0) {
    message.cause = in.cause();
  }
  if ((fields & kCulprit) != 0 && in.flag()) {
    message.culprit = in.incarnation();
  }
  if ((fields & kStep) != 0) {
    message.step.committed = in.step();
    message.step.launched = in.flag();
    message.step.finished = in.flag();
  }
  if ((fields & kLeaving) != 0) {
    message.leaving = static_cast<Message::Leaving>(in.number(1, static_cast<uint64_t>(Message::Leaving::AtOnce)));
  }
  if ((fields & kReach) != 0) {
    message.reach = in.set();
  }
  if ((fields & kNewcomers) != 0) {
    message.newcomers = in.incarnations(kMaxNewcomers);
  }
  if ((fields & kAccepted) != 0) {
    message.accepted = in.accepted();
  }
  if ((fields & kTestaments) != 0) {
    const size_t count = in.number(2, kMaxMembers);
    MemberSet of;
    for (size_t i = 0; i < count && in.ok(); ++i) {
      Testament testament;
      testament.position = static_cast<int>(in.number(2, kMaxMembers - 1));
      testament.accepted = in.accepted();
      if (of.test(static_cast<size_t>(testament.position))) {
        in.fail();
      }
      of.set(static_cast<size_t>(testament.position));
      message.testaments.push_back(std::move(testament));
    }
  }
  if ((fields & kNext) != 0) {
    message.next = in.view();
  }
  return in.complete() ? std::optional<Message>(std::move(message)) : std::nullopt;
}

std::string encode(const Record& record) {
  Writer out;
  out.number(kVersion, 1);
  out.view(record.view);
  out.accepted(record.accepted);
  out.number(record.past.size(), 1);
  for (const View& view : record.past) {
    out.view(view);
  }
  return out.take();
}

std::optional<Record> decodeRecord(const std::string& bytes) {
  Reader in(bytes);
  if (in.number(1) != kVersion) {
    return std::nullopt;
  }
  Record record;
  record.view = in.view();
  record.accepted = in.accepted();
  const size_t past = in.number(1, kMaxPast);
  for (size_t i = 0; i < past && in.ok(); ++i) {
    record.past.push_back(in.view());
  }
  return in.complete() ? std::optional<Record>(std::move(record)) : std::nullopt;
}

} // namespace pycomm::elastic
