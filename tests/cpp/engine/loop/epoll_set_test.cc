#include "engine/loop/epoll_set.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <stdexcept>

#include "base/error.h"
#include "within.h"

namespace pycomm {
namespace {

struct FakeHandler final : Loop::Handler {
  void onThrown(const std::exception_ptr&) noexcept override {
    ++thrown;
  }
  void onReady(uint32_t events) override {
    ++calls;
    seen = events;
    on_ready();
  }
  int calls = 0;
  int thrown = 0;
  uint32_t seen = 0;
  std::function<void()> on_ready = [] {};
};

int64_t millisecondsOf(const std::function<void()>& body) {
  const TimePoint began = Clock::now();
  body();
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count();
}

/// An eventfd that is readable.
UniqueFd readable() {
  return UniqueFd(::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK));
}

int handleAll(EpollSet& set) {
  EpollSet::Ready ready;
  set.wait(ready, 0);
  set.handle(ready);
  return ready.count;
}

TEST(EpollSet, CallsTheHandlerUntilUnwatched) {
  EpollSet set;
  const UniqueFd fd = readable();
  FakeHandler handler;
  set.watch(fd.get(), EPOLLIN, handler);
  EXPECT_EQ(handleAll(set), 1);
  EXPECT_EQ(handler.seen, static_cast<uint32_t>(EPOLLIN));
  set.watch(fd.get(), EPOLLOUT, handler); // a second call changes the events
  EXPECT_EQ(handleAll(set), 1);
  EXPECT_EQ(handler.seen, static_cast<uint32_t>(EPOLLOUT));
  set.unwatch(fd.get());
  EXPECT_EQ(handleAll(set), 0);
  EXPECT_EQ(handler.calls, 2);
}

TEST(EpollSet, ASignalEndsAWaitAndIsTakenByIt) {
  EpollSet set;
  set.signal();
  set.signal();
  EpollSet::Ready ready;
  EXPECT_WITHIN_MS(millisecondsOf([&] { set.wait(ready, 10000); }), 5000);
  EXPECT_EQ(ready.count, 1);
  set.handle(ready);
  EXPECT_EQ(handleAll(set), 0);
}

TEST(EpollSet, ASleepTakesNothing) {
  EpollSet set;
  set.signal();
  EXPECT_WITHIN_MS(millisecondsOf([&] { set.sleep(10000); }), 5000);
  EXPECT_EQ(handleAll(set), 1);
}

// Two descriptors are ready. The handler that comes first closes the other's descriptor, and a new one with the same number is watched:
// the kernel's report belongs to the old one.
TEST(EpollSet, AnEventOfAnEarlierDescriptorOfThisNumberIsDropped) {
  EpollSet set;
  UniqueFd fds[2] = {readable(), readable()};
  FakeHandler handlers[2];
  FakeHandler late;
  int reused = -1;
  for (int i = 0; i < 2; ++i) {
    const int other = 1 - i;
    handlers[i].on_ready = [&, other] {
      reused = fds[other].get();
      set.unwatch(reused);
      ASSERT_EQ(::dup2(fds[1 - other].get(), reused), reused);
      set.watch(reused, EPOLLIN, late);
    };
    set.watch(fds[i].get(), EPOLLIN, handlers[i]);
  }
  EXPECT_EQ(handleAll(set), 2);
  EXPECT_EQ(handlers[0].calls + handlers[1].calls, 1);
  EXPECT_EQ(late.calls, 0);
  EXPECT_GE(reused, 0);
}

TEST(EpollSet, WhatAHandlerThrowsGoesToIt) {
  EpollSet set;
  const UniqueFd fds[2] = {readable(), readable()};
  FakeHandler handlers[2];
  for (int i = 0; i < 2; ++i) {
    handlers[i].on_ready = [] { throw std::runtime_error("onReady"); };
    set.watch(fds[i].get(), EPOLLIN, handlers[i]);
  }
  EXPECT_EQ(handleAll(set), 2);
  EXPECT_EQ(handlers[0].thrown, 1);
  EXPECT_EQ(handlers[1].thrown, 1);
}

TEST(EpollSet, ADescriptorThatCannotBeWatchedIsATypedError) {
  EpollSet set;
  FakeHandler handler;
  try {
    set.watch(-1, EPOLLIN, handler);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.record().code, ErrorCode::SystemError);
    EXPECT_EQ(error.record().summary, "an event loop could not be set up: epoll_ctl failed");
  }
}

} // namespace
} // namespace pycomm
