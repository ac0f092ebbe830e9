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
#include "engine/meeting/endpoint.h"
#include "engine/meeting/endpoint_words.h"
#include "engine/meeting/meeting_store.h"
#include "engine/survive/kept_record.h"
#include "engine/survive/outbox.h"
#include "transport/net/listener.h"

namespace pycomm {
namespace {

/// Knows one member.
struct Letters final : Endpoint::Mailbox {
  [[nodiscard]] bool knows(
      const ProcessId& from,
      const std::string& /*handle*/,
      const std::optional<ProcessId>& /*endpoint*/) override {
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

/// An endpoint with one incarnation, and a way to it.
struct OpenEndpoint {
  OpenEndpoint() {
    Endpoint::Config config;
    config.id = newProcessId();
    config.nonce = 7;
    config.listeners.push_back(Listener::bind(SocketAddress::loopback(AddressFamily::IPv4), {}));
    endpoint = Endpoint::open(engine.control(), std::move(config));
    handle.incarnation = newProcessId();
    handle = endpoint->addressed(handle);
    visitor = Endpoint::open(engine.control(), {{}, "", nullptr, newProcessId(), 1});
  }
  [[nodiscard]] Visitor from(const ProcessId& incarnation) const {
    MemberHandle self = handle;
    self.incarnation = incarnation;
    return {*visitor, self, false};
  }
  [[nodiscard]] std::unique_ptr<Link> dial() const {
    return pycomm::dial(handle, from(newProcessId()), Deadline::after(3000), AbortToken()).link;
  }
  [[nodiscard]] static std::string ask(Link& link, const std::vector<std::string_view>& request) {
    return askEndpoint(link, request, Deadline::after(3000), AbortToken()).front();
  }

  Engine engine;
  std::shared_ptr<Endpoint> endpoint;
  std::shared_ptr<Endpoint> visitor;
  MemberHandle handle;
};

TEST(Endpoint, TakesMessagesOfMembersOnly) {
  const OpenEndpoint open;
  const auto letters = std::make_shared<Letters>();
  const ProcessId& to = open.handle.incarnation;
  const auto agree = [&](const ProcessId& incarnation, const ProcessId& from) {
    return OpenEndpoint::ask(*open.dial(), {endpoint_request::kAgree, incarnation, from, "handle"});
  };
  EXPECT_EQ(agree(to, letters->member), endpoint_answer::kGone); // nobody is there
  open.endpoint->add(to);
  EXPECT_EQ(agree(to, letters->member), endpoint_answer::kNotYet);
  open.endpoint->receive(to, letters);
  EXPECT_EQ(agree(newProcessId(), letters->member), endpoint_answer::kGone);
  EXPECT_EQ(agree(to, newProcessId()), endpoint_answer::kGone);
  EXPECT_EQ(OpenEndpoint::ask(*open.dial(), {endpoint_request::kSay, "early"}), endpoint_answer::kGone);

  const auto link = open.dial();
  EXPECT_EQ(
      OpenEndpoint::ask(*link, {endpoint_request::kAgree, to, letters->member, "handle"}), endpoint_answer::kHere);
  EXPECT_EQ(OpenEndpoint::ask(*link, {endpoint_request::kSay, std::string(100000, 'x')}), endpoint_answer::kHere);
  EXPECT_EQ(
      OpenEndpoint::ask(*link, {endpoint_request::kAgree, to, letters->member, "handle"}), endpoint_answer::kGone);
  EXPECT_EQ(OpenEndpoint::ask(*link, {endpoint_request::kSet, "key", "value"}), endpoint_answer::kGone);
  EXPECT_EQ(letters->all(), std::vector<std::string>{std::string(100000, 'x')});

  const auto another = open.dial(); // which ends the first
  EXPECT_EQ(
      OpenEndpoint::ask(*another, {endpoint_request::kAgree, to, letters->member, "handle"}), endpoint_answer::kHere);
  EXPECT_THROW((void)OpenEndpoint::ask(*link, {endpoint_request::kSay, "late"}), Error);
  open.endpoint->remove(to);
  EXPECT_EQ(agree(to, letters->member), endpoint_answer::kGone);
}

TEST(Endpoint, TakesAStateBesideTheMessages) {
  const OpenEndpoint open;
  const auto letters = std::make_shared<Letters>();
  const ProcessId& to = open.handle.incarnation;
  open.endpoint->add(to);
  EXPECT_EQ(OpenEndpoint::ask(*open.dial(), {endpoint_request::kWho, to}), endpoint_answer::kNotYet);
  open.endpoint->receive(to, letters);
  EXPECT_EQ(OpenEndpoint::ask(*open.dial(), {endpoint_request::kWho, newProcessId()}), endpoint_answer::kGone);
  EXPECT_EQ(
      askEndpoint(*open.dial(), {endpoint_request::kWho, to}, Deadline::after(3000), AbortToken()),
      (std::vector<std::string>{std::string(endpoint_answer::kHere), "a model", "a handle"}));

  const auto messages = open.dial();
  EXPECT_EQ(
      OpenEndpoint::ask(*messages, {endpoint_request::kAgree, to, letters->member, "handle"}), endpoint_answer::kHere);
  const auto state = open.dial();
  EXPECT_EQ(
      OpenEndpoint::ask(*state, {endpoint_request::kState, "part"}),
      endpoint_answer::kGone); // nobody has introduced itself
  const auto given = open.dial();
  EXPECT_EQ(OpenEndpoint::ask(*given, {endpoint_request::kGive, to, newProcessId(), "handle"}), endpoint_answer::kGone);
  EXPECT_EQ(
      OpenEndpoint::ask(*given, {endpoint_request::kGive, to, letters->member, "handle"}), endpoint_answer::kHere);
  EXPECT_EQ(OpenEndpoint::ask(*given, {endpoint_request::kState, "part"}), endpoint_answer::kHere);
  EXPECT_EQ(OpenEndpoint::ask(*given, {endpoint_request::kState, "other"}), endpoint_answer::kNone);
  EXPECT_EQ(OpenEndpoint::ask(*given, {endpoint_request::kSay, "a message"}), endpoint_answer::kGone);
  EXPECT_EQ(OpenEndpoint::ask(*messages, {endpoint_request::kSay, "a message"}), endpoint_answer::kHere); // it goes on
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
  const OpenEndpoint open;
  const auto letters = std::make_shared<Letters>();
  open.endpoint->add(open.handle.incarnation);
  open.endpoint->receive(open.handle.incarnation, letters);
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
  const OpenEndpoint open;
  const auto letters = std::make_shared<Letters>();
  const ProcessId& to = open.handle.incarnation;
  open.endpoint->add(to);
  open.endpoint->receive(to, letters);
  Outbox outbox(open.handle, open.from(letters->member));
  outbox.push("one");
  turn(outbox, 5000);
  const auto another = open.dial(); // which ends the first connection
  EXPECT_EQ(
      OpenEndpoint::ask(*another, {endpoint_request::kAgree, to, letters->member, "handle"}), endpoint_answer::kHere);
  outbox.push("two");
  turn(outbox, 5000);
  EXPECT_EQ(letters->all(), (std::vector<std::string>{"one", "two"}));
}

TEST(Outbox, BringsTheNewestIfThereAreTooMany) {
  const OpenEndpoint open;
  const auto letters = std::make_shared<Letters>();
  open.endpoint->add(open.handle.incarnation);
  open.endpoint->receive(open.handle.incarnation, letters);
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
  OpenEndpoint open;
  open.endpoint->close();
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
  OpenEndpoint open;
  Outbox outbox(open.handle, open.from(newProcessId()));
  outbox.push("somebody listens, who does not know this process");
  turn(outbox, 5000);
  EXPECT_FALSE(outbox.wasRefused());
  open.endpoint->close();
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
  const Witness witness = Witness::of(self, engine.localPeers().name(), key, Deadline::after(3000));
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
  EXPECT_THROW((void)Witness::of(other, engine.localPeers().name(), key, Deadline::after(3000)), Error);
}

} // namespace
} // namespace pycomm
