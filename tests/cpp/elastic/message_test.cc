#include "elastic/message.h"

#include <gtest/gtest.h>

namespace pycomm::elastic {
namespace {

using Kind = Message::Kind;

View view() {
  View view;
  view.epoch = 5;
  view.parent = 77;
  view.members = {{1, 2}, {3, 4}, {5, 6}};
  view.step = 1000;
  view.cause = ErrorCode::PeerDead;
  view.left = MemberSet(0b1000);
  return view;
}

Message full(Kind kind) {
  Message message;
  message.kind = kind;
  message.from = {1, 2};
  message.epoch = 4;
  message.view = 77;
  message.ballot = Ballot(2, 3, 1);
  message.nonce = 9;
  message.cause = ErrorCode::ConnectionReset;
  message.culprit = Incarnation{3, 4};
  message.step = {999, true, true};
  message.leaving = Message::Leaving::AtOnce;
  message.reach = MemberSet(0b101);
  message.newcomers = {{7, 8}};
  message.accepted = Accepted{Ballot(0, 1, 2), view()};
  message.testaments = {{1, Accepted{Ballot(0, 1, 2), view()}}, {2, std::nullopt}};
  message.next = view();
  return message;
}

TEST(ElasticMessage, EveryKindIsReadAsItWasWritten) {
  for (int kind = 1; kind <= static_cast<int>(Kind::Goodbye); ++kind) {
    const std::string bytes = encode(full(static_cast<Kind>(kind)));
    const std::optional<Message> read = decodeMessage(bytes);
    ASSERT_TRUE(read) << kind;
    EXPECT_EQ(read->kind, static_cast<Kind>(kind));
    EXPECT_EQ(read->from, (Incarnation{1, 2}));
    EXPECT_EQ(encode(*read), bytes) << kind;
  }
  const std::optional<Message> promise = decodeMessage(encode(full(Kind::Promise)));
  EXPECT_EQ(promise->step, (StepState{999, true, true}));
  EXPECT_EQ(promise->accepted, full(Kind::Promise).accepted);
  EXPECT_EQ(promise->testaments, full(Kind::Promise).testaments);
  EXPECT_EQ(promise->reach, MemberSet(0b101));
  EXPECT_EQ(promise->leaving, Message::Leaving::AtOnce);
  EXPECT_FALSE(promise->next); // no field of a promise
}

TEST(ElasticMessage, EveryPrefixAndEveryTailIsRefused) {
  for (int kind = 1; kind <= static_cast<int>(Kind::Goodbye); ++kind) {
    const std::string bytes = encode(full(static_cast<Kind>(kind)));
    for (size_t nbytes = 0; nbytes < bytes.size(); ++nbytes) {
      EXPECT_FALSE(decodeMessage(bytes.substr(0, nbytes))) << kind << " " << nbytes;
    }
    EXPECT_FALSE(decodeMessage(bytes + '\0')) << kind;
  }
}

TEST(ElasticMessage, WhatNoPeerWritesIsRefused) {
  const auto broken = [](auto change) {
    Message message = full(Kind::Decide);
    change(message);
    return !decodeMessage(encode(message));
  };
  EXPECT_FALSE(broken([](Message&) {}));
  EXPECT_TRUE(broken([](Message& m) { m.next->members.push_back({1, 2}); })); // twice
  EXPECT_TRUE(broken([](Message& m) { m.next->cause = static_cast<ErrorCode>(999); }));
  EXPECT_TRUE(broken([](Message& m) { m.next->step = -1; }));
  EXPECT_TRUE(broken([](Message& m) { m.next->epoch = UINT64_MAX; }));
  EXPECT_TRUE(broken([](Message& m) {
    for (uint64_t i = 0; i < kMaxMembers; ++i) {
      m.next->members.push_back({100, i});
    }
  }));
  Message twice = full(Kind::Refuse);
  twice.testaments.push_back(twice.testaments.front());
  EXPECT_FALSE(decodeMessage(encode(twice)));
  std::string version = encode(full(Kind::Ping));
  version[0] = 2;
  EXPECT_FALSE(decodeMessage(version));
  std::string kind = encode(full(Kind::Ping));
  kind[1] = 0;
  EXPECT_FALSE(decodeMessage(kind));
  kind[1] = 13;
  EXPECT_FALSE(decodeMessage(kind));
}

TEST(ElasticMessage, ALengthThatTheBytesDoNotHaveTakesNoMemory) {
  std::string bytes = encode(full(Kind::Decide));
  bytes.resize(bytes.size() - 3 * 16); // the members
  bytes[bytes.size() - 2] = 0;
  bytes[bytes.size() - 1] = 1; // 256 of them
  EXPECT_FALSE(decodeMessage(bytes));
}

TEST(ElasticRecord, IsReadAsItWasWritten) {
  Record record;
  record.view = view();
  record.accepted = Accepted{Ballot(0, 1, 2), view()};
  record.past = {view(), view()};
  EXPECT_EQ(decodeRecord(encode(record)), record);
  const std::string bytes = encode(record);
  for (size_t nbytes = 0; nbytes < bytes.size(); ++nbytes) {
    EXPECT_FALSE(decodeRecord(bytes.substr(0, nbytes)));
  }
  record.past.assign(kMaxPast + 1, view());
  EXPECT_FALSE(decodeRecord(encode(record)));
}

TEST(ElasticView, ItsIdDependsOnAllOfIt) {
  const uint64_t id = view().id();
  const auto changed = [&](auto change) {
    View other = view();
    change(other);
    return other.id() != id;
  };
  EXPECT_EQ(view().id(), id);
  EXPECT_TRUE(changed([](View& v) { ++v.epoch; }));
  EXPECT_TRUE(changed([](View& v) { ++v.parent; }));
  EXPECT_TRUE(changed([](View& v) { ++v.step; }));
  EXPECT_TRUE(changed([](View& v) { v.cause = ErrorCode::Ok; }));
  EXPECT_TRUE(changed([](View& v) { v.members.pop_back(); }));
  EXPECT_TRUE(changed([](View& v) { std::swap(v.members[0], v.members[1]); }));
  EXPECT_EQ(view().position({3, 4}), 1);
  EXPECT_EQ(view().position({9, 9}), -1);
}

} // namespace
} // namespace pycomm::elastic
