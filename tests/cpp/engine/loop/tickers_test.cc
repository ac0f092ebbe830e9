#include "engine/loop/tickers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>

namespace pycomm {
namespace {

using ::testing::ElementsAre;
using Look = Loop::Ticker::Look;

struct FakeTicker final : Loop::Ticker {
  explicit FakeTicker(TimePoint next = TimePoint::max()) : next_tick(next) {}
  void onThrown(const std::exception_ptr&) noexcept override {
    ++thrown;
  }
  [[nodiscard]] TimePoint nextTick() const noexcept override {
    return next_tick;
  }
  void tick(TimePoint) override {
    ++ticks;
    on_tick();
  }
  Look look() override {
    ++looks;
    return looked;
  }
  [[nodiscard]] bool sharesMemory() const noexcept override {
    return shares;
  }
  bool pollShared() override {
    ++polls;
    return moved;
  }
  bool restShared() noexcept override {
    return rests;
  }

  TimePoint next_tick;
  Look looked = Look::Nothing;
  bool shares = false;
  bool moved = false;
  bool rests = true;
  int ticks = 0;
  int looks = 0;
  int polls = 0;
  int thrown = 0;
  std::function<void()> on_tick = [] {};
};

TimePoint at(int ms) {
  return TimePoint{} + std::chrono::milliseconds(ms);
}

TEST(Tickers, CallsThoseThatAreDue) {
  Tickers tickers;
  EXPECT_EQ(tickers.nextTick(), TimePoint::max());
  FakeTicker early(at(10));
  FakeTicker late(at(20));
  tickers.add(late);
  tickers.add(early);
  EXPECT_EQ(tickers.nextTick(), at(10));
  tickers.tick(at(10));
  EXPECT_EQ(early.ticks, 1);
  EXPECT_EQ(late.ticks, 0);
}

TEST(Tickers, OfThoseThatHaveWorkEachGetsItsTurn) {
  Tickers tickers;
  FakeTicker first(Loop::Ticker::kAtOnce);
  FakeTicker due(at(0));
  FakeTicker second(Loop::Ticker::kAtOnce);
  for (FakeTicker* ticker : {&first, &due, &second}) {
    tickers.add(*ticker);
  }
  for (int turn = 1; turn <= 3; ++turn) {
    EXPECT_TRUE(tickers.tick(at(0)));
    EXPECT_EQ(first.ticks, (turn + 1) / 2);
    EXPECT_EQ(second.ticks, turn / 2);
    EXPECT_EQ(due.ticks, turn) << "nobody's work delays it";
    EXPECT_TRUE(tickers.haveWork());
  }
  first.next_tick = TimePoint::max();
  second.on_tick = [&] { second.next_tick = TimePoint::max(); };
  EXPECT_TRUE(tickers.tick(at(0)));
  EXPECT_EQ(second.ticks, 2);
  EXPECT_FALSE(tickers.haveWork());
}

TEST(Tickers, OneMayLeaveWhileItIsCalledAndRemoveAnother) {
  Tickers tickers;
  FakeTicker first(at(0));
  FakeTicker second(at(0));
  FakeTicker third(at(0));
  first.on_tick = [&] {
    tickers.remove(first);
    tickers.remove(second);
  };
  for (FakeTicker* ticker : {&first, &second, &third}) {
    tickers.add(*ticker);
  }
  tickers.tick(at(1));
  tickers.tick(at(2));
  EXPECT_THAT((std::vector<int>{first.ticks, second.ticks, third.ticks}), ElementsAre(1, 0, 2));
}

TEST(Tickers, OneThatIsAddedDuringATickIsCalledToo) {
  Tickers tickers;
  FakeTicker added(at(0));
  FakeTicker first(at(0));
  first.on_tick = [&] {
    for (int i = 0; first.ticks == 1 && i < 100; ++i) { // the list moves to other memory meanwhile
      tickers.add(added);
    }
  };
  tickers.add(first);
  tickers.tick(at(1));
  EXPECT_EQ(added.ticks, 100);
}

TEST(Tickers, WhatOneThrowsGoesToItAndTheOthersAreCalled) {
  Tickers tickers;
  FakeTicker thrower(at(0));
  thrower.on_tick = [] { throw std::runtime_error("tick"); };
  FakeTicker other(at(0));
  tickers.add(thrower);
  tickers.add(other);
  tickers.tick(at(1));
  EXPECT_EQ(thrower.thrown, 1);
  EXPECT_EQ(other.thrown, 0);
  EXPECT_EQ(other.ticks, 1);
}

TEST(Tickers, ALookEndsWithTheFirstThatMoved) {
  Tickers tickers;
  FakeTicker nothing;
  FakeTicker not_yet;
  FakeTicker last;
  not_yet.looked = Look::NotYet;
  for (FakeTicker* ticker : {&nothing, &not_yet, &last}) {
    tickers.add(*ticker);
  }
  EXPECT_EQ(tickers.look(), Look::NotYet); // one waits for something
  EXPECT_EQ(last.looks, 1);
  not_yet.looked = Look::Moved;
  EXPECT_EQ(tickers.look(), Look::Moved);
  EXPECT_EQ(last.looks, 1);
}

TEST(Tickers, AllPollAndAllMustRest) {
  Tickers tickers;
  FakeTicker moved;
  FakeTicker awake;
  tickers.add(moved);
  tickers.add(awake);
  EXPECT_FALSE(tickers.pollShared());
  EXPECT_FALSE(tickers.sharesMemory());
  EXPECT_TRUE(tickers.restShared());
  moved.moved = true;
  awake.rests = false;
  awake.shares = true;
  EXPECT_TRUE(tickers.pollShared());
  EXPECT_EQ(awake.polls, 2); // also after one that moved
  EXPECT_TRUE(tickers.sharesMemory());
  EXPECT_FALSE(tickers.restShared());
  tickers.remove(awake);
  EXPECT_FALSE(tickers.sharesMemory());
  EXPECT_TRUE(tickers.restShared());
}

} // namespace
} // namespace pycomm
