#include "transport/link_conformance.h"

#include <gmock/gmock.h>
#include <poll.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "transport/error_matchers.h"
#include "transport/process.h"

namespace pycomm::testing {
namespace {

using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

constexpr int64_t kSlackMs = 3000; // for a machine that is busy with other things
const AbortToken kNoAbort;

Deadline soon() {
  return Deadline::after(30000);
}

// Bytes that a shift, a swap or a repetition changes.
Bytes pattern(size_t nbytes, uint32_t seed) {
  Bytes bytes(nbytes);
  uint32_t state = seed * 2654435761U + 1;
  for (std::byte& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

ConstBufferView view(const Bytes& bytes) {
  return {bytes.data(), bytes.size()};
}

Bytes readExactly(Link& link, size_t nbytes) {
  Bytes bytes(nbytes);
  readAll(link, {bytes.data(), nbytes}, soon(), kNoAbort);
  return bytes;
}

// Waits for the end of the peer's side; false if bytes came instead.
bool readsEnd(Link& link) {
  std::byte byte{};
  for (const Deadline deadline = soon(); !deadline.expired();) {
    const Progress progress = link.tryRead({&byte, 1});
    if (progress.closed || progress.nbytes > 0) {
      return progress.closed;
    }
    pollfd wait{link.fd(), POLLIN, 0};
    (void)::poll(&wait, 1, 100);
  }
  return false;
}

/// The other end of a test's link, in its place. `body` gets it and says whether all was as expected.
class Peer {
 public:
  Peer(PeerPlace place, LinkPair& pair, const std::function<bool(Link&)>& body) {
    if (place == PeerPlace::Process) {
      process_.emplace([&] {
        pair.first.reset();
        const bool good = body(*pair.second);
        pair.second.reset();
        return good;
      });
      pair.second.reset();
      return;
    }
    thread_ = std::thread([this, body, link = std::move(pair.second)]() mutable {
      try {
        good_ = body(*link);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "peer: " << error.what();
      }
      link.reset();
    });
  }
  ~Peer() {
    if (thread_.joinable()) {
      thread_.join();
    }
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  [[nodiscard]] bool join() {
    if (process_) {
      return process_->join(60000);
    }
    thread_.join();
    return good_;
  }
  void kill() const {
    process_->kill();
  }

 private:
  std::optional<Process> process_;
  std::thread thread_;
  std::atomic<bool> good_{false};
};

PeerPlace placeOf(const LinkConformance& test) {
  return std::get<1>(test.GetParam());
}
LinkPair connect(const LinkConformance& test) {
  return std::get<0>(test.GetParam()).connect();
}

TEST_P(LinkConformance, CarriesBytesBothWays) {
  LinkPair pair = connect(*this);
  Peer peer(placeOf(*this), pair, [](Link& link) {
    const Bytes got = readExactly(link, 1000);
    writeAll(link, view(got), soon(), kNoAbort);
    return got == pattern(1000, 1);
  });
  EXPECT_FALSE(pair.first->describe().empty());
  EXPECT_GE(pair.first->fd(), 0);
  writeAll(*pair.first, view(pattern(1000, 1)), soon(), kNoAbort);
  EXPECT_EQ(readExactly(*pair.first, 1000), pattern(1000, 1));
  EXPECT_TRUE(peer.join());
  EXPECT_TRUE(readsEnd(*pair.first));
}

TEST_P(LinkConformance, TakesEmptyBuffers) {
  LinkPair pair = connect(*this);
  Peer peer(placeOf(*this), pair, [](Link& link) {
    const std::byte one{1};
    writeAll(link, {&one, 1}, soon(), kNoAbort);
    return readsEnd(link);
  });
  pollfd ready{pair.first->fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&ready, 1, 20000), 1);
  writeAll(*pair.first, {}, soon(), kNoAbort);
  readAll(*pair.first, {}, soon(), kNoAbort);
  const ConstBufferView nothing[2];
  EXPECT_EQ(pair.first->tryWrite(nothing, 2).nbytes, 0U);
  const Progress read = pair.first->tryRead({});
  EXPECT_FALSE(read.closed);
  EXPECT_EQ(read.nbytes, 0U);
  pair.first->shutdownWrite();
  EXPECT_TRUE(peer.join());
}

// Both sides send and receive at once with more than any buffer holds: whoever only wrote would wait forever.
bool exchange(Link& link, const Bytes& out, Bytes& in) {
  size_t sent = 0;
  size_t received = 0;
  for (const Deadline deadline = soon(); sent < out.size() || received < in.size();) {
    if (deadline.expired()) {
      return false;
    }
    size_t moved = 0;
    if (sent < out.size()) {
      const ConstBufferView rest = view(out).slice(sent, out.size() - sent);
      moved = link.tryWrite(&rest, 1).nbytes;
      sent += moved;
    }
    if (received < in.size()) {
      const Progress progress = link.tryRead({in.data() + received, in.size() - received});
      if (progress.closed) {
        return false;
      }
      received += progress.nbytes;
      moved += progress.nbytes;
    }
    if (moved == 0) {
      const int wanted = (sent < out.size() ? POLLOUT : 0) | (received < in.size() ? POLLIN : 0);
      pollfd wait{link.fd(), static_cast<short>(wanted), 0};
      (void)::poll(&wait, 1, 100);
    }
  }
  return true;
}

TEST_P(LinkConformance, MovesMuchInBothDirectionsAtOnce) {
  constexpr size_t kNbytes = 24U << 20;
  LinkPair pair = connect(*this);
  Peer peer(placeOf(*this), pair, [](Link& link) {
    Bytes got(kNbytes);
    return exchange(link, pattern(kNbytes, 3), got) && got == pattern(kNbytes, 2);
  });
  Bytes got(kNbytes);
  EXPECT_TRUE(exchange(*pair.first, pattern(kNbytes, 2), got));
  EXPECT_TRUE(got == pattern(kNbytes, 3));
  EXPECT_TRUE(peer.join());
}

TEST_P(LinkConformance, WritesPartsWhenThePeerDoesNotRead) {
  LinkPair pair = connect(*this);
  // The peer starts to read only when told how much to expect; until then the writer fills every buffer there is.
  Peer peer(placeOf(*this), pair, [](Link& link) {
    Bytes all;
    uint64_t expected = 0;
    std::byte part[10007];
    pollfd wait{link.fd(), POLLIN, 0};
    (void)::poll(&wait, 1, 10000);
    for (;;) {
      const Progress progress = link.tryRead({part, sizeof part});
      if (progress.closed) {
        break;
      }
      if (progress.would_block) {
        (void)::poll(&wait, 1, 100);
      }
      all.insert(all.end(), part, part + progress.nbytes);
    }
    if (all.size() < sizeof expected) {
      return false;
    }
    std::memcpy(&expected, all.data() + all.size() - sizeof expected, sizeof expected);
    all.resize(all.size() - sizeof expected);
    const Bytes whole = pattern(32U << 20, 5);
    return all.size() == expected && std::equal(all.begin(), all.end(), whole.begin());
  });
  const Bytes whole = pattern(32U << 20, 5);
  uint64_t sent = 0;
  bool partial = false;
  for (bool full = false; !full && sent < whole.size();) {
    const size_t wanted = std::min<size_t>(4U << 20, whole.size() - sent);
    const ConstBufferView rest = view(whole).slice(sent, wanted);
    const Progress progress = pair.first->tryWrite(&rest, 1);
    sent += progress.nbytes;
    partial = partial || (progress.nbytes > 0 && progress.nbytes < wanted);
    full = progress.would_block;
    EXPECT_TRUE(!progress.would_block || progress.nbytes == 0);
  }
  EXPECT_TRUE(partial);
  writeAll(*pair.first, {reinterpret_cast<const std::byte*>(&sent), sizeof sent}, soon(), kNoAbort);
  pair.first->shutdownWrite();
  EXPECT_TRUE(peer.join());
}

TEST_P(LinkConformance, WritesManyViewsInOrder) {
  constexpr size_t kViews = 300;
  const Bytes whole = pattern(kViews * (kViews + 1) / 2, 7);
  LinkPair pair = connect(*this);
  Peer peer(placeOf(*this), pair, [&whole](Link& link) { return readExactly(link, whole.size()) == whole; });
  // Lengths 0, 1, 2, … 300.
  std::vector<ConstBufferView> views;
  for (size_t i = 0, offset = 0; i <= kViews; offset += i, ++i) {
    views.push_back(view(whole).slice(offset, i));
  }
  size_t first = 0;
  for (const Deadline deadline = soon(); first < views.size() && !deadline.expired();) {
    size_t moved = pair.first->tryWrite(views.data() + first, views.size() - first).nbytes;
    while (first < views.size() && moved >= views[first].nbytes) {
      moved -= views[first++].nbytes;
    }
    if (first < views.size()) {
      views[first] = views[first].slice(moved, views[first].nbytes - moved);
    }
  }
  EXPECT_EQ(first, views.size());
  EXPECT_TRUE(peer.join());
}

TEST_P(LinkConformance, ReportsAPeerThatClosesMidway) {
  LinkPair pair = connect(*this);
  Peer peer(placeOf(*this), pair, [](Link& link) {
    writeAll(link, view(pattern(600, 9)), soon(), kNoAbort);
    return true;
  });
  Bytes room(1000);
  const TimePoint begin = Clock::now();
  const ErrorRecord record =
      errorOf([&] { readAll(*pair.first, {room.data(), room.size()}, soon(), kNoAbort); });
  EXPECT_EQ(record.code, ErrorCode::ConnectionReset);
  EXPECT_EQ(record.bytes_done, 600);
  EXPECT_EQ(record.bytes_total, 1000);
  EXPECT_THAT(record.summary, HasSubstr(pair.first->describe()));
  EXPECT_LT(elapsedMs(begin), kSlackMs);
  EXPECT_TRUE(peer.join());
}

TEST_P(LinkConformance, FailsToWriteToAPeerThatIsGoneWithoutASignal) {
  LinkPair pair = connect(*this);
  Peer peer(placeOf(*this), pair, [](Link&) { return true; });
  ASSERT_TRUE(peer.join());
  const Bytes bytes = pattern(64U << 20, 1);
  const TimePoint begin = Clock::now();
  const ErrorRecord record = errorOf([&] { writeAll(*pair.first, view(bytes), soon(), kNoAbort); });
  EXPECT_EQ(record.code, ErrorCode::ConnectionReset);
  EXPECT_THAT(record.cause, ::testing::AnyOf(HasSubstr("EPIPE"), HasSubstr("ECONNRESET")));
  EXPECT_LT(elapsedMs(begin), kSlackMs);
}

TEST_P(LinkConformance, EndsAtTheDeadline) {
  LinkPair pair = connect(*this);
  SharedFlag done;
  Peer peer(placeOf(*this), pair, [&done](Link&) { return done.wait(); }); // neither reads nor writes
  Bytes bytes(64U << 20);
  for (const bool writing : {false, true}) {
    const TimePoint begin = Clock::now();
    const Deadline deadline = Deadline::after(150, begin);
    const ErrorRecord record = errorOf([&] {
      writing ? writeAll(*pair.first, view(bytes), deadline, kNoAbort)
              : readAll(*pair.first, {bytes.data(), 8}, deadline, kNoAbort);
    });
    EXPECT_EQ(record.code, ErrorCode::Timeout);
    EXPECT_EQ(record.bytes_total, writing ? static_cast<int64_t>(bytes.size()) : 8);
    EXPECT_GE(elapsedMs(begin), 150);
    EXPECT_LT(elapsedMs(begin), 150 + kSlackMs);
  }
  done.raise();
  EXPECT_TRUE(peer.join());
}

TEST_P(LinkConformance, EndsAtTheDeadlineAlsoWhileBytesTrickle) {
  LinkPair pair = connect(*this);
  Peer peer(placeOf(*this), pair, [](Link& link) {
    const std::byte one{};
    try {
      for (const Deadline deadline = soon(); !deadline.expired();) {
        writeAll(link, {&one, 1}, deadline, kNoAbort);
        (void)::poll(nullptr, 0, 2);
      }
    } catch (const Error&) {
      return true; // the reader gave up and closed
    }
    return false;
  });
  Bytes room(1U << 20);
  const TimePoint begin = Clock::now();
  const ErrorRecord record = errorOf(
      [&] { readAll(*pair.first, {room.data(), room.size()}, Deadline::after(200), kNoAbort); });
  EXPECT_EQ(record.code, ErrorCode::Timeout);
  EXPECT_LT(elapsedMs(begin), 200 + kSlackMs);
  pair.first.reset();
  EXPECT_TRUE(peer.join());
}

TEST_P(LinkConformance, EndsWithin100MsOfAnAbort) {
  LinkPair pair = connect(*this);
  ErrorRecord reason;
  reason.code = ErrorCode::Aborted;
  reason.summary = "enough";
  // The best of a few tries: other work on the machine may delay any single one.
  int64_t best_ms = kSlackMs;
  for (int i = 0; i < 5; ++i) {
    AbortToken abort;
    std::atomic<bool> waiting{false};
    TimePoint ended;
    std::thread reader([&] {
      std::byte byte{};
      waiting = true;
      const ErrorRecord record = errorOf([&] { readAll(*pair.first, {&byte, 1}, soon(), abort); });
      ended = Clock::now();
      EXPECT_EQ(record.code, ErrorCode::Aborted);
      EXPECT_EQ(record.summary, "enough");
    });
    while (!waiting) {
      std::this_thread::yield();
    }
    const TimePoint begin = Clock::now();
    abort.abort(reason);
    reader.join();
    best_ms = std::min<int64_t>(best_ms, std::chrono::duration_cast<std::chrono::milliseconds>(ended - begin).count());
  }
  EXPECT_LE(best_ms, 100);
}

TEST_P(LinkConformance, StillReadsAfterItsWriteSideEnded) {
  LinkPair pair = connect(*this);
  Peer peer(placeOf(*this), pair, [](Link& link) {
    const bool good = readExactly(link, 100) == pattern(100, 4) && readsEnd(link);
    writeAll(link, view(pattern(200, 5)), soon(), kNoAbort);
    return good;
  });
  writeAll(*pair.first, view(pattern(100, 4)), soon(), kNoAbort);
  pair.first->shutdownWrite();
  EXPECT_EQ(readExactly(*pair.first, 200), pattern(200, 5));
  EXPECT_TRUE(readsEnd(*pair.first));
  EXPECT_TRUE(peer.join());
}

TEST_P(LinkConformance, ClosesGentlyWithoutLosingWhatIsQueued) {
  constexpr size_t kMost = 64U << 20;
  LinkPair pair = connect(*this);
  SharedFlag closed;
  // The peer has sent what nobody reads, which alone would turn the close into a reset, and reads only after it.
  Peer peer(placeOf(*this), pair, [&closed](Link& link) {
    writeAll(link, view(pattern(5000, 6)), soon(), kNoAbort);
    if (!closed.wait()) {
      return false;
    }
    const auto nbytes = static_cast<size_t>(closed.value());
    const Bytes whole = pattern(nbytes, 8);
    return readExactly(link, nbytes) == whole && readsEnd(link);
  });
  pollfd ready{pair.first->fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&ready, 1, 20000), 1);
  const Bytes whole = pattern(kMost, 8);
  size_t queued = 0;
  for (bool full = false; !full && queued < kMost;) {
    const ConstBufferView rest = view(whole).slice(queued, kMost - queued);
    const Progress progress = pair.first->tryWrite(&rest, 1);
    queued += progress.nbytes;
    full = progress.would_block;
  }
  const TimePoint begin = Clock::now();
  closeGently(*pair.first);
  EXPECT_LT(elapsedMs(begin), kSlackMs);
  pair.first.reset();
  closed.raise(static_cast<int64_t>(queued));
  EXPECT_TRUE(peer.join());
}

TEST_P(LinkConformance, EndsItsWriteSideWhenClosingGently) {
  LinkPair pair = connect(*this);
  closeGently(*pair.first);
  EXPECT_TRUE(readsEnd(*pair.second)); // though the first end still exists
}

TEST_P(LinkConformance, NoticesAPeerThatEndsWithoutGoodbye) {
  LinkPair pair = connect(*this);
  const bool in_process = placeOf(*this) == PeerPlace::Process;
  Peer peer(placeOf(*this), pair, [in_process](Link& link) {
    const std::byte ready{1};
    writeAll(link, {&ready, 1}, soon(), kNoAbort);
    if (in_process) {
      (void)::poll(nullptr, 0, 20000); // until it is killed
    } else {
      pollfd wait{link.fd(), POLLIN, 0};
      (void)::poll(&wait, 1, 20000); // then it closes over what it has not read
    }
    return true;
  });
  (void)readExactly(*pair.first, 1);
  writeAll(*pair.first, view(pattern(100, 1)), soon(), kNoAbort);
  const TimePoint begin = Clock::now();
  if (in_process) {
    peer.kill();
  }
  EXPECT_EQ(errorOf([&] { (void)readExactly(*pair.first, 1); }).code, ErrorCode::ConnectionReset);
  EXPECT_LT(elapsedMs(begin), kSlackMs);
  EXPECT_EQ(peer.join(), !in_process);
}

} // namespace
} // namespace pycomm::testing
