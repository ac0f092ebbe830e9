#include "transport/memory/shared_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/link_peer.h"
#include "transport/socket_pairs.h"

namespace pycomm {
namespace {

using testing::Bytes;
using testing::errorOf;
using ::testing::HasSubstr;
using testing::kNoAbort;
using testing::LinkCase;
using testing::LinkConformance;
using testing::LinkPair;
using testing::namelessPair;
using testing::pattern;
using testing::PeerPlace;
using testing::Process;
using testing::readExactly;
using testing::soon;

struct LinkEnds {
  std::shared_ptr<const SharedArena> arena;
  std::unique_ptr<SharedLink> first;
  std::unique_ptr<SharedLink> second;
  RingMemory out; ///< from first to second
};

LinkEnds connected(size_t nbytes, bool both_ways = true) {
  LinkEnds ends;
  const size_t total = RingMemory::totalNbytes(nbytes);
  ends.arena = std::make_shared<const SharedArena>(SharedArena::create(2 * total));
  ends.arena->commit(0, 2 * total);
  (void)::madvise(ends.arena->at(0), 2 * total, MADV_DOFORK); // the test's peer is a child
  ends.out = {ends.arena->at(0), nbytes};
  const RingMemory back{ends.arena->at(total), nbytes};
  auto [near, far] = namelessPair();
  SharedLink::Rings here{ends.arena, ends.out, std::nullopt};
  SharedLink::Rings there{ends.arena, std::nullopt, ends.out};
  if (both_ways) {
    here.in = back;
    there.out = back;
  }
  ends.first = std::make_unique<SharedLink>(std::move(near), std::move(here));
  ends.second = std::make_unique<SharedLink>(std::move(far), std::move(there));
  return ends;
}

LinkPair pairOf(size_t nbytes) {
  LinkEnds ends = connected(nbytes);
  return {std::move(ends.first), std::move(ends.second)};
}

INSTANTIATE_TEST_SUITE_P(
    Shared,
    LinkConformance,
    ::testing::Combine(
        ::testing::Values(
            LinkCase{"Of16KiB", [] { return pairOf(16 << 10); }},
            LinkCase{"Of1MiB", [] { return pairOf(1 << 20); }}),
        ::testing::Values(PeerPlace::Thread, PeerPlace::Process)),
    [](const auto& test) {
      return std::get<0>(test.param).name + (std::get<1>(test.param) == PeerPlace::Thread ? "Thread" : "Process");
    });

bool readable(const Link& link, int timeout_ms = 0) {
  pollfd wait{link.fd(), POLLIN, 0};
  return ::poll(&wait, 1, timeout_ms) == 1;
}

Progress writeBytes(Link& link, const Bytes& bytes) {
  const ConstBufferView whole(bytes.data(), bytes.size());
  return link.tryWrite(&whole, 1);
}

// Pieces of every length round a small ring, some of them as two views, read in pieces of other lengths.
TEST(SharedLink, GoesRoundTheRing) {
  LinkEnds ends = connected(4096, false);
  const Bytes whole = pattern(300000, 3);
  Bytes got;
  for (size_t sent = 0, step = 1; got.size() < whole.size(); step = step % 5000 + 37) {
    const size_t nbytes = std::min(step, whole.size() - sent);
    const ConstBufferView all(whole.data() + sent, nbytes);
    const ConstBufferView views[] = {all.slice(0, nbytes / 3), all.slice(nbytes / 3, nbytes - nbytes / 3)};
    sent += ends.first->tryWrite(views, 2).nbytes;
    Bytes room(step * 7 % 3001 + 1);
    const Progress progress = ends.second->tryRead({room.data(), room.size()});
    got.insert(got.end(), room.begin(), room.begin() + static_cast<std::ptrdiff_t>(progress.nbytes));
  }
  EXPECT_EQ(got, whole);
}

TEST(SharedLink, TakesWhatFitsAndThenNothing) {
  LinkEnds ends = connected(4096, false);
  const Bytes bytes = pattern(5000, 1);
  EXPECT_EQ(writeBytes(*ends.first, bytes).nbytes, 4096U);
  EXPECT_FALSE(ends.first->canWrite());
  const Progress none = writeBytes(*ends.first, bytes);
  EXPECT_EQ(none.nbytes, 0U);
  EXPECT_TRUE(none.would_block);
}

// A writer wakes the other end by the kernel only if that end sleeps: not for each of a hundred writes.
TEST(SharedLink, RingsOnlyForWhoSleeps) {
  LinkEnds ends = connected(4096, false);
  const Bytes one = pattern(1, 1);
  Bytes room(64);
  EXPECT_TRUE(ends.second->tryRead({room.data(), 64}).would_block);
  (void)writeBytes(*ends.first, one);
  EXPECT_TRUE(readable(*ends.second)); // it slept
  EXPECT_EQ(ends.second->tryRead({room.data(), 64}).nbytes, 1U);
  EXPECT_FALSE(readable(*ends.second)); // the bell is heard with that
  for (int i = 0; i < 100; ++i) {
    (void)writeBytes(*ends.first, one);
    EXPECT_TRUE(ends.second->canRead());
    EXPECT_EQ(ends.second->tryRead({room.data(), 64}).nbytes, 1U);
  }
  EXPECT_FALSE(readable(*ends.second));
  EXPECT_TRUE(ends.second->readSleeps());
  (void)writeBytes(*ends.first, one);
  EXPECT_TRUE(readable(*ends.second));
  EXPECT_FALSE(ends.second->readSleeps()); // there is something
}

TEST(SharedLink, TellsAWriterOfRoomOnceThereIsSome) {
  LinkEnds ends = connected(4096, false);
  const Bytes bytes = pattern(4096, 1);
  (void)writeBytes(*ends.first, bytes);
  EXPECT_TRUE(writeBytes(*ends.first, bytes).would_block);
  Bytes room(4096);
  EXPECT_EQ(ends.second->tryRead({room.data(), 100}).nbytes, 100U);
  EXPECT_FALSE(readable(*ends.first)); // for so little it would wake again and again
  EXPECT_EQ(ends.second->tryRead({room.data(), 1000}).nbytes, 1000U);
  EXPECT_TRUE(readable(*ends.first));
  EXPECT_EQ(writeBytes(*ends.first, bytes).nbytes, 1100U);
}

TEST(SharedLink, ReadsWhatAKilledWriterLeft) {
  LinkEnds ends = connected(1 << 20, false);
  Process writer([&] {
    ends.second.reset();
    (void)writeBytes(*ends.first, pattern(100000, 4));
    (void)::poll(nullptr, 0, 20000); // until it is killed
    return true;
  });
  ends.first.reset();
  ASSERT_TRUE(readable(*ends.second, 20000));
  for (const Deadline deadline = soon(); !ends.second->canRead() && !deadline.expired();) {
    std::this_thread::yield();
  }
  const Bytes begin = readExactly(*ends.second, 10);
  for (const Deadline deadline = soon(); ends.out.words().written.load() < 100000 && !deadline.expired();) {
    std::this_thread::yield();
  }
  writer.kill();
  (void)writer.join();
  const Bytes whole = pattern(100000, 4);
  EXPECT_EQ(begin, Bytes(whole.begin(), whole.begin() + 10));
  EXPECT_EQ(readExactly(*ends.second, 99990), Bytes(whole.begin() + 10, whole.end()));
  EXPECT_EQ(errorOf([&] { (void)readExactly(*ends.second, 1); }).code, ErrorCode::ConnectionReset);
}

// A bell may come when the reader has its bytes already. The kernel then calls the end of the connection a reset.
TEST(SharedLink, APeerThatClosedWithABellUnheardHasEnded) {
  LinkEnds ends = connected(4096);
  (void)writeBytes(*ends.second, pattern(100, 1));
  ASSERT_EQ(::send(ends.first->fd(), "", 1, MSG_NOSIGNAL), 1);
  ends.second.reset();
  EXPECT_EQ(readExactly(*ends.first, 100), pattern(100, 1));
  std::byte byte{};
  EXPECT_TRUE(ends.first->tryRead({&byte, 1}).closed);
  EXPECT_TRUE(ends.first->tryRead({&byte, 1}).closed);
  // As after any end, a write fails as soon as it can know.
  const ErrorRecord record = errorOf([&] {
    for (int i = 0; i < 3; ++i) {
      (void)writeBytes(*ends.first, pattern(4096, 2));
    }
  });
  EXPECT_EQ(record.code, ErrorCode::ConnectionReset);
}

// The reader of a link of one direction is gone: the next write fails, though the ring has room.
// A bell that the peer rang just before it closed is read before the end.
TEST(SharedLink, AnOrderlyEndIsNoResetWhateverBellsAreUnread) {
  for (const bool rings : {false, true}) {
    LinkEnds ends = connected(4096, false);
    const Progress full = writeBytes(*ends.first, pattern(8192, 1));
    ASSERT_LT(full.nbytes, 8192U);
    ASSERT_TRUE(writeBytes(*ends.first, pattern(10, 1)).would_block) << "it sleeps until there is room";
    if (rings) {
      EXPECT_EQ(readExactly(*ends.second, full.nbytes).size(), full.nbytes);
      ASSERT_TRUE(readable(*ends.first, 20000)) << "there is no bell";
    }
    ends.second.reset();
    EXPECT_FALSE(ends.first->isReset()) << rings;
  }
}

TEST(SharedLink, FailsToWriteOnceTheReaderIsKnownToBeGone) {
  LinkEnds ends = connected(4096, false);
  (void)writeBytes(*ends.first, pattern(10, 1));
  EXPECT_FALSE(ends.first->hearBell());
  ends.second.reset();
  ASSERT_TRUE(readable(*ends.first, 20000));
  EXPECT_TRUE(ends.first->hearBell());
  const ErrorRecord record = errorOf([&] { (void)writeBytes(*ends.first, pattern(10, 1)); });
  EXPECT_EQ(record.code, ErrorCode::ConnectionReset);
  EXPECT_THAT(record.cause, HasSubstr("EPIPE"));
}

TEST(SharedLink, BelievesNoCounterThatCannotBe) {
  for (const uint64_t lie : {uint64_t{4097}, uint64_t{1} << 40, ~uint64_t{0}}) {
    LinkEnds ends = connected(4096, false);
    Bytes room(8192);
    ends.out.words().written = lie;
    EXPECT_TRUE(ends.second->canRead());
    EXPECT_EQ(
        errorOf([&] { (void)ends.second->tryRead({room.data(), room.size()}); }).code, ErrorCode::ProtocolViolation);
  }
  { // backwards
    LinkEnds ends = connected(4096, false);
    Bytes room(8192);
    (void)writeBytes(*ends.first, pattern(100, 1));
    (void)ends.second->tryRead({room.data(), 10});
    ends.out.words().written = 50;
    const Progress rest = ends.second->tryRead({room.data(), 90}); // what it has seen is there all the same
    EXPECT_EQ(rest.nbytes, 90U);
    EXPECT_EQ(errorOf([&] { (void)ends.second->tryRead({room.data(), 10}); }).code, ErrorCode::ProtocolViolation);
  }
  for (const uint64_t lie : {uint64_t{4097}, uint64_t{5000}, ~uint64_t{0}}) {
    LinkEnds ends = connected(4096, false);
    (void)writeBytes(*ends.first, pattern(4096, 1));
    ends.out.words().taken = lie;
    EXPECT_TRUE(ends.first->canWrite());
    EXPECT_EQ(errorOf([&] { (void)writeBytes(*ends.first, pattern(10, 1)); }).code, ErrorCode::ProtocolViolation);
  }
}

// Both sides sleep after each try that moved nothing and are woken by nothing but the connection: a wake-up that is lost ends this at
// the deadline.
TEST(SharedLink, LosesNoWakeUp) {
  LinkEnds ends = connected(4096, false);
  const Bytes whole = pattern(1 << 20, 9);
  const Deadline deadline = Deadline::after(120000); // each sleep takes until the other thread gets a core
  std::atomic<bool> late{false};
  const auto sleep = [&](const Link& link) {
    if (!readable(link, 15000)) {
      late = true;
    }
  };
  std::thread writer([&] {
    for (size_t sent = 0, step = 1; sent < whole.size() && !late; step = step * 7 % 5003) {
      const ConstBufferView part(whole.data() + sent, std::min(step, whole.size() - sent));
      const Progress progress = ends.first->tryWrite(&part, 1);
      sent += progress.nbytes;
      if (progress.would_block) {
        sleep(*ends.first);
      }
    }
  });
  Bytes got(whole.size());
  for (size_t read = 0, step = 3; read < got.size() && !late && !deadline.expired(); step = step * 11 % 4999) {
    const Progress progress = ends.second->tryRead({got.data() + read, std::min(step, got.size() - read)});
    read += progress.nbytes;
    if (progress.would_block) {
      sleep(*ends.second);
    }
  }
  writer.join();
  EXPECT_FALSE(late);
  EXPECT_EQ(got, whole);
}

// The connection beside the ring is made and greeted like any other; the link is up when it is.
TEST(SharedLink, IsUpWhenItsConnectionIs) {
  class Pending final : public Link {
   public:
    [[nodiscard]] int fd() const noexcept override {
      return -1;
    }
    [[nodiscard]] Progress tryWrite(const ConstBufferView*, size_t) override {
      return {};
    }
    [[nodiscard]] Progress tryRead(BufferView) override {
      return {};
    }
    [[nodiscard]] bool finishConnect() override {
      return ++asked_ == 2;
    }
    void shutdownWrite() noexcept override {}
    [[nodiscard]] std::string describe() const override {
      return "pending";
    }

   private:
    int asked_ = 0;
  };
  LinkEnds ends = connected(4096, false);
  SharedLink link(std::make_unique<Pending>(), {ends.arena, ends.out, std::nullopt}, SharedLink::State::Connecting);
  EXPECT_EQ(link.roomEvent(), POLLOUT);
  EXPECT_FALSE(link.finishConnect());
  EXPECT_EQ(link.roomEvent(), POLLOUT);
  EXPECT_TRUE(link.finishConnect());
  EXPECT_EQ(link.roomEvent(), POLLIN);
  EXPECT_TRUE(link.finishConnect()); // and not asked again
}

} // namespace
} // namespace pycomm
