#include <gtest/gtest.h>

#include <poll.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "engine/engine.h"
#include "engine/meeting/door.h"
#include "engine/meeting/door_words.h"
#include "engine/meeting/meeting_store.h"
#include "engine/survive/kept_record.h"
#include "engine/survive/outbox.h"
#include "transport/net/listener.h"

namespace pycomm {
namespace {

/// Knows one member.
struct Letters final : Door::Mailbox {
  [[nodiscard]] bool knows(
      const ProcessId& from,
      const std::string& /*handle*/,
      const std::optional<ProcessId>& /*door*/) override {
    return from == member;
  }
  [[nodiscard]] std::vector<std::string> notice() const override {
    return {"a model", "a handle"};
  }
  [[nodiscard]] bool take(const ProcessId& from, const std::vector<std::string>& words) override {
    return from == member && words.size() == 2 && words[1] == "part";
  }
  [[nodiscard]] bool deliver(const ProcessId& from, const std::string& bytes) override {
    const std::lock_guard<std::mutex> lock(mutex);
    EXPECT_EQ(from, member);
    bodies.push_back(bytes);
    return true;
  }
  [[nodiscard]] std::vector<std::string> all() {
    const std::lock_guard<std::mutex> lock(mutex);
    return bodies;
  }
  const ProcessId member = newProcessId();
  std::mutex mutex; ///< guards bodies
  std::vector<std::string> bodies;
};

/// A door with one incarnation, and a way to it.
struct OpenDoor {
  OpenDoor() {
    Door::Config config;
    config.id = newProcessId();
    config.nonce = 7;
    config.listeners.push_back(Listener::bind(SocketAddress::loopback(AddressFamily::IPv4), {}));
    door = Door::open(engine.control(), std::move(config));
    handle.incarnation = newProcessId();
    handle = door->addressed(handle);
    visitor = Door::open(engine.control(), {{}, "", nullptr, newProcessId(), 1});
  }
  [[nodiscard]] Visitor from(const ProcessId& incarnation) const {
    MemberHandle self = handle;
    self.incarnation = incarnation;
    return {*visitor, self, false};
  }
  [[nodiscard]] std::unique_ptr<Link> knock() const {
    return pycomm::knock(handle, from(newProcessId()), Deadline::after(3000), AbortToken()).link;
  }
  [[nodiscard]] static std::string ask(Link& link, const std::vector<std::string_view>& request) {
    return askDoor(link, request, Deadline::after(3000), AbortToken()).front();
  }

  Engine engine;
  std::shared_ptr<Door> door;
  std::shared_ptr<Door> visitor;
  MemberHandle handle;
};

TEST(Door, TakesMessagesOfMembersOnly) {
  const OpenDoor open;
  const auto letters = std::make_shared<Letters>();
  const ProcessId& to = open.handle.incarnation;
  const auto agree = [&](const ProcessId& incarnation, const ProcessId& from) {
    return OpenDoor::ask(*open.knock(), {door_request::kAgree, incarnation, from, "handle"});
  };
  EXPECT_EQ(agree(to, letters->member), door_answer::kGone); // nobody is there
  open.door->add(to);
  EXPECT_EQ(agree(to, letters->member), door_answer::kNotYet);
  open.door->receive(to, letters);
  EXPECT_EQ(agree(newProcessId(), letters->member), door_answer::kGone);
  EXPECT_EQ(agree(to, newProcessId()), door_answer::kGone);
  EXPECT_EQ(OpenDoor::ask(*open.knock(), {door_request::kSay, "early"}), door_answer::kGone);

  const auto link = open.knock();
  EXPECT_EQ(OpenDoor::ask(*link, {door_request::kAgree, to, letters->member, "handle"}), door_answer::kHere);
  EXPECT_EQ(OpenDoor::ask(*link, {door_request::kSay, std::string(100000, 'x')}), door_answer::kHere);
  EXPECT_EQ(OpenDoor::ask(*link, {door_request::kAgree, to, letters->member, "handle"}), door_answer::kGone);
  EXPECT_EQ(OpenDoor::ask(*link, {door_request::kSet, "key", "value"}), door_answer::kGone);
  EXPECT_EQ(letters->all(), std::vector<std::string>{std::string(100000, 'x')});

  const auto another = open.knock(); // which ends the first
  EXPECT_EQ(OpenDoor::ask(*another, {door_request::kAgree, to, letters->member, "handle"}), door_answer::kHere);
  EXPECT_THROW((void)OpenDoor::ask(*link, {door_request::kSay, "late"}), Error);
  open.door->remove(to);
  EXPECT_EQ(agree(to, letters->member), door_answer::kGone);
}

TEST(Door, TakesAStateBesideTheMessages) {
  const OpenDoor open;
  const auto letters = std::make_shared<Letters>();
  const ProcessId& to = open.handle.incarnation;
  open.door->add(to);
  EXPECT_EQ(OpenDoor::ask(*open.knock(), {door_request::kWho, to}), door_answer::kNotYet);
  open.door->receive(to, letters);
  EXPECT_EQ(OpenDoor::ask(*open.knock(), {door_request::kWho, newProcessId()}), door_answer::kGone);
  EXPECT_EQ(
      askDoor(*open.knock(), {door_request::kWho, to}, Deadline::after(3000), AbortToken()),
      (std::vector<std::string>{std::string(door_answer::kHere), "a model", "a handle"}));

  const auto messages = open.knock();
  EXPECT_EQ(OpenDoor::ask(*messages, {door_request::kAgree, to, letters->member, "handle"}), door_answer::kHere);
  const auto state = open.knock();
  EXPECT_EQ(OpenDoor::ask(*state, {door_request::kState, "part"}), door_answer::kGone); // nobody has introduced itself
  const auto given = open.knock();
  EXPECT_EQ(OpenDoor::ask(*given, {door_request::kGive, to, newProcessId(), "handle"}), door_answer::kGone);
  EXPECT_EQ(OpenDoor::ask(*given, {door_request::kGive, to, letters->member, "handle"}), door_answer::kHere);
  EXPECT_EQ(OpenDoor::ask(*given, {door_request::kState, "part"}), door_answer::kHere);
  EXPECT_EQ(OpenDoor::ask(*given, {door_request::kState, "other"}), door_answer::kNone);
  EXPECT_EQ(OpenDoor::ask(*given, {door_request::kSay, "a message"}), door_answer::kGone);
  EXPECT_EQ(OpenDoor::ask(*messages, {door_request::kSay, "a message"}), door_answer::kHere); // it goes on
  EXPECT_EQ(letters->all(), std::vector<std::string>{"a message"});
}

/// As the agreement's thread does.
void turn(Outbox& outbox, int most_ms) {
  for (const Deadline end = Deadline::after(most_ms); !outbox.isIdle() && !end.expired();) {
    outbox.advance(Clock::now());
    pollfd ready{outbox.fd(), outbox.fd() < 0 ? short{0} : outbox.events(), 0};
    (void)::poll(&ready, 1, 2);
  }
}

TEST(Outbox, BringsMessagesInOrder) {
  const OpenDoor open;
  const auto letters = std::make_shared<Letters>();
  open.door->add(open.handle.incarnation);
  open.door->receive(open.handle.incarnation, letters);
  Outbox outbox(open.handle, open.from(letters->member));
  EXPECT_EQ(outbox.fd(), -1); // it connects when there is something to bring
  std::vector<std::string> sent;
  for (int i = 0; i < 20; ++i) {
    sent.push_back(std::to_string(i) + std::string(static_cast<size_t>(i) * 1000, 'x'));
    outbox.push(sent.back());
  }
  turn(outbox, 5000);
  EXPECT_EQ(letters->all(), sent);
}

TEST(Outbox, SendsAgainWhatABrokenConnectionHasNotTaken) {
  const OpenDoor open;
  const auto letters = std::make_shared<Letters>();
  const ProcessId& to = open.handle.incarnation;
  open.door->add(to);
  open.door->receive(to, letters);
  Outbox outbox(open.handle, open.from(letters->member));
  outbox.push("one");
  turn(outbox, 5000);
  const auto another = open.knock(); // which ends the first connection
  EXPECT_EQ(OpenDoor::ask(*another, {door_request::kAgree, to, letters->member, "handle"}), door_answer::kHere);
  outbox.push("two");
  turn(outbox, 5000);
  EXPECT_EQ(letters->all(), (std::vector<std::string>{"one", "two"}));
}

TEST(Outbox, BringsTheNewestIfThereAreTooMany) {
  const OpenDoor open;
  const auto letters = std::make_shared<Letters>();
  open.door->add(open.handle.incarnation);
  open.door->receive(open.handle.incarnation, letters);
  Outbox outbox(open.handle, open.from(letters->member));
  std::vector<std::string> newest;
  for (size_t i = 0; i < Outbox::kMost + 3; ++i) {
    outbox.push(std::to_string(i));
    if (i >= 3) {
      newest.push_back(std::to_string(i));
    }
  }
  turn(outbox, 5000);
  EXPECT_EQ(letters->all(), newest);
}

TEST(Outbox, KeepsLittleForAMemberThatIsGone) {
  OpenDoor open;
  open.door->close();
  Outbox outbox(open.handle, open.from(newProcessId()));
  for (size_t i = 0; i < 2 * Outbox::kMost; ++i) {
    outbox.push("message");
  }
  turn(outbox, 5000);
  EXPECT_TRUE(outbox.isIdle()); // dropped: it was refused
  EXPECT_EQ(outbox.fd(), -1);
  EXPECT_EQ(outbox.nextTick(), TimePoint::max());
}

TEST(Outbox, SaysOnceThatNobodyListens) {
  OpenDoor open;
  Outbox outbox(open.handle, open.from(newProcessId()));
  outbox.push("somebody listens, who does not know this process");
  turn(outbox, 5000);
  EXPECT_FALSE(outbox.wasRefused());
  open.door->close();
  Outbox refused(open.handle, open.from(newProcessId()));
  refused.push("message");
  turn(refused, 5000);
  EXPECT_TRUE(refused.wasRefused());
  EXPECT_FALSE(refused.wasRefused());
}

TEST(KeptRecord, IsReadByOtherProcessesOfTheHost) {
  Engine engine;
  const ProcessId incarnation = newProcessId();
  const MemoryKey key = recordKey(incarnation, nullptr);
  KeptRecord kept(engine, key);
  MemberHandle self;
  self.incarnation = incarnation;
  self.pid = ::getpid();
  const Witness witness = Witness::of(self, engine.hostMates().name(), key, Deadline::after(3000));
  EXPECT_FALSE(witness.record()); // nothing was kept
  for (uint64_t epoch = 1; epoch < 6; ++epoch) {
    elastic::Record record;
    record.view.epoch = epoch;
    for (uint64_t member = 0; member < elastic::kMaxMembers; ++member) {
      record.view.members.push_back({epoch, member + 1});
    }
    record.past.assign(elastic::kMaxPast, record.view);
    record.accepted = elastic::Accepted{elastic::Ballot(0, 1, 0), record.view}; // as large as one can be
    kept.keep(record);
    EXPECT_EQ(witness.record(), record);
  }
  MemberHandle other = self;
  other.pid = 1;
  EXPECT_THROW((void)Witness::of(other, engine.hostMates().name(), key, Deadline::after(3000)), Error);
}

} // namespace
} // namespace pycomm
