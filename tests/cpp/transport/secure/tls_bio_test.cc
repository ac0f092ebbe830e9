#include "transport/secure/tls_bio.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "allocations.h"
#include "base/error.h"
#include "transport/error_matchers.h"

namespace pycomm {
namespace {

using testing::errorOf;
using ::testing::HasSubstr;

constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

/// A link that takes and gives what the test says.
class Below final : public Link {
 public:
  [[nodiscard]] int fd() const noexcept override {
    return -1;
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override {
    throwIf(writes_fail);
    Progress progress;
    for (size_t i = 0; i < count; ++i) {
      const size_t nbytes = std::min(views[i].nbytes, room);
      taken.append(reinterpret_cast<const char*>(views[i].ptr), nbytes);
      room -= nbytes;
      progress.nbytes += nbytes;
    }
    progress.would_block = progress.nbytes == 0;
    return progress;
  }
  [[nodiscard]] Progress tryRead(BufferView into) override {
    asked.push_back(into.nbytes);
    throwIf(reads_fail);
    Progress progress;
    progress.nbytes = std::min(into.nbytes, arrived.size());
    std::memcpy(into.ptr, arrived.data(), progress.nbytes);
    arrived.erase(0, progress.nbytes);
    progress.closed = progress.nbytes == 0 && ended;
    progress.would_block = progress.nbytes == 0 && !ended;
    return progress;
  }
  void shutdownWrite() noexcept override {
    ++shutdowns;
    taken_at_shutdown = taken.size();
  }
  [[nodiscard]] std::string describe() const override {
    return "below";
  }

  size_t room = kNoLimit; ///< bytes that it still takes
  std::string taken;
  int shutdowns = 0;
  size_t taken_at_shutdown = 0;
  std::string arrived; ///< and not yet read
  bool ended = false; ///< nothing more arrives
  std::vector<size_t> asked; ///< the size of each read
  std::function<void()> writes_fail; ///< throws
  std::function<void()> reads_fail; ///< throws

 private:
  static void throwIf(const std::function<void()>& fails) {
    if (fails) {
      fails();
    }
  }
};

void loseConnection() {
  throw Error(ErrorCode::ConnectionReset, "the connection was lost");
}

/// A text in which no two places look alike.
std::string numbers(size_t nbytes) {
  std::string text;
  for (int i = 0; text.size() < nbytes; ++i) {
    text += std::to_string(i) + ",";
  }
  text.resize(nbytes);
  return text;
}

int write(TlsBio& bio, const std::string& bytes) {
  return bio.write(bytes.data(), bytes.size());
}

/// One read() as OpenSSL sees it.
struct Read {
  int result = 0;
  bool retry = false;
  std::string bytes;
};

Read read(TlsBio& bio, size_t nbytes) {
  Read read;
  std::string into(nbytes, '\0');
  read.result = bio.read(into.data(), nbytes, read.retry);
  read.bytes = into.substr(0, static_cast<size_t>(std::max(read.result, 0)));
  return read;
}

void expectRetry(const Read& read) {
  EXPECT_EQ(read.result, -1);
  EXPECT_TRUE(read.retry);
}

void expectRefusal(const Read& read) {
  EXPECT_EQ(read.result, -1);
  EXPECT_FALSE(read.retry);
}

TEST(TlsBio, SendsBytesInOrderThroughPartialWrites) {
  Below below;
  TlsBio bio(below);
  const std::string all = numbers(300000);
  EXPECT_FALSE(bio.hasWritten());
  for (size_t done = 0; done < all.size();) { // a quarter of what is written stays unsent, until no more fits
    below.room = 750;
    bio.flush();
    const std::string next = all.substr(done, 1000);
    if (!bio.full()) {
      ASSERT_EQ(write(bio, next), static_cast<int>(next.size()));
      done += next.size();
    }
    EXPECT_TRUE(bio.hasWritten());
  }
  EXPECT_TRUE(bio.unsent());
  below.room = kNoLimit;
  bio.flush();
  EXPECT_FALSE(bio.unsent());
  EXPECT_EQ(below.taken, all);
  ASSERT_EQ(write(bio, "more"), 4);
  bio.flush();
  EXPECT_EQ(below.taken, all + "more");
}

TEST(TlsBio, RefusesMoreThanARecordBeyondFull) {
  Below below;
  below.room = 0;
  TlsBio bio(below);
  ASSERT_EQ(write(bio, numbers((64 << 10) - 1)), (64 << 10) - 1);
  EXPECT_FALSE(bio.full());
  ASSERT_EQ(write(bio, "x"), 1);
  EXPECT_TRUE(bio.full());
  constexpr int kRoom = (16 << 10) + 512;
  EXPECT_EQ(write(bio, numbers(kRoom + 1)), -1);
  ASSERT_EQ(write(bio, numbers(kRoom)), kRoom);
  EXPECT_EQ(write(bio, "x"), -1);
  EXPECT_EQ(bio.failure(), nullptr); // the peer's doing
  below.room = 1;
  bio.flush();
  EXPECT_EQ(write(bio, "x"), 1); // what is sent does not count
  EXPECT_EQ(write(bio, "x"), -1);
  below.room = kNoLimit;
  bio.flush();
  EXPECT_EQ(below.taken, numbers((64 << 10) - 1) + "x" + numbers(kRoom) + "x");
}

TEST(TlsBio, KeepsUnsentBytesIfTheLinkBelowFails) {
  Below below;
  TlsBio bio(below);
  below.writes_fail = loseConnection;
  ASSERT_EQ(write(bio, "abc"), 3);
  EXPECT_EQ(errorOf([&] { bio.flush(); }).code, ErrorCode::ConnectionReset);
  EXPECT_TRUE(bio.unsent());
  EXPECT_EQ(bio.failure(), nullptr); // so reads go on
  below.writes_fail = nullptr;
  bio.flush();
  EXPECT_EQ(below.taken, "abc");
}

TEST(TlsBio, EndsTheWriteSideBehindTheLastByte) {
  Below below;
  TlsBio bio(below);
  ASSERT_EQ(write(bio, "abc"), 3);
  EXPECT_FALSE(bio.endsWriting());
  for (const int room : {0, 2}) {
    below.room = static_cast<size_t>(room);
    bio.shutdownWrite();
    EXPECT_TRUE(bio.endsWriting());
    EXPECT_EQ(below.shutdowns, 0);
  }
  below.room = 1;
  bio.flush();
  EXPECT_EQ(below.shutdowns, 1);
  EXPECT_EQ(below.taken_at_shutdown, 3U);
  bio.flush();
  bio.shutdownWrite();
  EXPECT_EQ(below.shutdowns, 1);

  Below idle;
  TlsBio silent(idle);
  silent.shutdownWrite(); // nothing is unsent
  EXPECT_EQ(idle.shutdowns, 1);
}

TEST(TlsBio, AsksOpenSslToRetryUntilBytesArriveAndEndsOnce) {
  Below below;
  TlsBio bio(below);
  expectRetry(read(bio, 10));
  EXPECT_FALSE(bio.underEnded());
  below.arrived = "abcde";
  EXPECT_EQ(read(bio, 2).bytes, "ab");
  EXPECT_EQ(read(bio, 10).bytes, "cde");
  EXPECT_EQ(below.asked.size(), 2U); // one for all five
  expectRetry(read(bio, 10));
  below.ended = true;
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(bio.atEnd(), i > 0); // nobody knows before the first read
    const Read end = read(bio, 10);
    EXPECT_EQ(end.result, 0);
    EXPECT_FALSE(end.retry);
    EXPECT_TRUE(bio.atEnd());
    EXPECT_TRUE(bio.underEnded());
  }
  EXPECT_EQ(below.asked.size(), 4U);
}

TEST(TlsBio, EveryExceptionOfTheLinkBelowIsKept) {
  Below below;
  TlsBio bio(below);
  below.arrived = "ab";
  EXPECT_EQ(read(bio, 1).bytes, "a");
  below.reads_fail = loseConnection;
  EXPECT_EQ(read(bio, 1).bytes, "b"); // what came before it
  for (int i = 0; i < 2; ++i) {
    expectRefusal(read(bio, 1));
    EXPECT_THAT(errorOf([&] { std::rethrow_exception(bio.failure()); }).summary, HasSubstr("the connection was lost"));
  }
  EXPECT_EQ(below.asked.size(), 2U);
  EXPECT_FALSE(bio.atEnd());

  Below small;
  TlsBio other(small);
  small.reads_fail = [] { throw std::bad_alloc(); };
  expectRefusal(read(other, 1));
  EXPECT_THROW(std::rethrow_exception(other.failure()), std::bad_alloc);
}

// OpenSSL would do nothing more with the connection.
TEST(TlsBio, AWriteNeedsNoMemory) {
  Below below;
  below.room = 0;
  TlsBio bio(below);
  const std::string all = numbers((64 << 10) + (16 << 10) + 512);
  testing::failAllocation(1);
  for (size_t done = 0; done < all.size(); done += 512) {
    EXPECT_EQ(bio.write(all.data() + done, 512), 512);
  }
  const bool allocated = testing::allocationFailed();
  testing::failAllocation(0);
  EXPECT_FALSE(allocated);
  EXPECT_EQ(bio.failure(), nullptr);
  below.room = kNoLimit;
  bio.flush();
  EXPECT_EQ(below.taken, all);
}

TEST(TlsBio, AFailureOfSomebodyElseEndsReading) {
  Below below;
  TlsBio bio(below);
  below.arrived = "abc";
  EXPECT_EQ(read(bio, 1).bytes, "a");
  try {
    loseConnection();
  } catch (const Error&) {
    bio.fail();
  }
  expectRefusal(read(bio, 1));
  EXPECT_EQ(errorOf([&] { std::rethrow_exception(bio.failure()); }).code, ErrorCode::ConnectionReset);
}

TEST(TlsBio, AHandshakeOfMoreThan4KiBIsRefused) {
  for (const size_t piece : {size_t{1}, size_t{1000}, size_t{1} << 14}) {
    for (const bool done_in_time : {false, true}) {
      Below below;
      TlsBio bio(below);
      const std::string all = numbers(20000);
      below.arrived = all;
      std::string got;
      while (got.size() < 4096) {
        const Read part = read(bio, std::min(piece, 4096 - got.size()));
        ASSERT_GT(part.result, 0) << got.size();
        got += part.bytes;
      }
      if (!done_in_time) {
        expectRefusal(read(bio, 1));
        EXPECT_EQ(bio.failure(), nullptr); // the peer's doing
        continue;
      }
      EXPECT_FALSE(bio.handshakeDone());
      bio.finishHandshake();
      EXPECT_TRUE(bio.handshakeDone());
      while (got.size() < all.size()) {
        const Read part = read(bio, piece);
        ASSERT_GT(part.result, 0) << got.size();
        got += part.bytes;
      }
      EXPECT_EQ(got, all);
    }
  }
}

// Most connections carry a handshake and control frames only.
TEST(TlsBio, ReadsFurtherAheadOnceTheSmallBufferHasBeenFull) {
  constexpr size_t kSmall = 4 << 10;
  constexpr size_t kLarge = 64 << 10;
  Below below;
  TlsBio bio(below);
  const auto readAll = [&](size_t nbytes) {
    const std::string all = numbers(nbytes);
    below.arrived = all;
    below.asked.clear();
    std::string got;
    for (Read part; (part = read(bio, 1 << 20)).result > 0;) {
      got += part.bytes;
    }
    EXPECT_EQ(got, all);
    return below.asked;
  };
  using Sizes = std::vector<size_t>;
  EXPECT_EQ(readAll(kSmall), Sizes({kSmall, kSmall})); // a handshake that is as long as it may be
  bio.finishHandshake();
  EXPECT_EQ(readAll(kSmall - 1), Sizes({kSmall, kSmall}));
  EXPECT_EQ(readAll(kSmall), Sizes({kSmall, kLarge}));
  EXPECT_EQ(readAll(3 * kLarge), Sizes({kLarge, kLarge, kLarge, kLarge}));
}

TEST(TlsBio, KeepsTheFirstTwoBytesOfThePeer) {
  Below below;
  TlsBio bio(below);
  EXPECT_EQ(bio.first(), "");
  below.arrived = "c";
  (void)read(bio, 10);
  EXPECT_EQ(bio.first(), "c");
  below.arrived = "yz";
  (void)read(bio, 10);
  EXPECT_EQ(bio.first(), "cy");
  below.arrived = "123";
  (void)read(bio, 10);
  EXPECT_EQ(bio.first(), "cy");
}

TEST(TlsBio, HasARecordOnceItsLastByteIsReadAhead) {
  const std::string large = std::string("\x17\x03\x03\x01\x02", 5) + std::string(0x102, 'x');
  const std::string empty("\x17\x03\x03\x00\x00", 5);
  for (const std::string& record : {large, empty}) {
    for (size_t nbytes = 0; nbytes <= record.size(); ++nbytes) {
      Below below;
      TlsBio bio(below);
      below.arrived = "x" + record.substr(0, nbytes);
      EXPECT_FALSE(bio.hasRecord());
      EXPECT_EQ(read(bio, 1).bytes, "x");
      EXPECT_EQ(bio.hasRecord(), nbytes == record.size()) << nbytes;
    }
  }
}

} // namespace
} // namespace pycomm
