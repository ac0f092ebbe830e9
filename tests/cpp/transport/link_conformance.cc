#include "transport/link_conformance.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "transport/link_peer.h"

namespace pycomm::testing {
namespace {

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

// Both sides send and receive at once with more than any buffer holds: a side that only wrote would wait for ever.
bool exchange(Link& link, const Bytes& out, Bytes& in) {
  size_t sent = 0;
  size_t received = 0;
  for (const Deadline deadline = soon(); sent < out.size() || received < in.size() || link.unsent();) {
    if (deadline.expired()) {
      return false;
    }
    size_t moved = 0;
    if (sent < out.size() || link.unsent()) {
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
      const int wanted =
          (sent < out.size() || link.unsent() ? link.roomEvent() : 0) | (received < in.size() ? POLLIN : 0);
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
    return exchange(link, pattern(kNbytes, 3), got) && same(got, pattern(kNbytes, 2));
  });
  Bytes got(kNbytes);
  EXPECT_TRUE(exchange(*pair.first, pattern(kNbytes, 2), got));
  EXPECT_TRUE(same(got, pattern(kNbytes, 3)));
  EXPECT_TRUE(peer.join());
}

TEST_P(LinkConformance, WritesPartsWhenThePeerDoesNotRead) {
  LinkPair pair = connect(*this);
  std::array<int, 2> gate{};
  ASSERT_EQ(::pipe2(gate.data(), O_CLOEXEC), 0);
  // The peer starts to read when the gate opens: by then the writer has filled every buffer there is.
  Peer peer(placeOf(*this), pair, [gate](Link& link) {
    Bytes all;
    uint64_t expected = 0;
    std::byte part[10007];
    pollfd open{gate[0], POLLIN, 0};
    if (::poll(&open, 1, soon().remainingMs(30000)) != 1) {
      return false;
    }
    pollfd wait{link.fd(), POLLIN, 0};
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
    return all.size() == expected && std::memcmp(all.data(), whole.data(), all.size()) == 0;
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
  EXPECT_LT(sent, whole.size());
  EXPECT_EQ(::write(gate[1], "", 1), 1);
  writeAll(*pair.first, {reinterpret_cast<const std::byte*>(&sent), sizeof sent}, soon(), kNoAbort);
  pair.first->shutdownWrite();
  EXPECT_TRUE(peer.join());
  ::close(gate[0]);
  ::close(gate[1]);
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
  writeAll(*pair.first, {}, soon(), kNoAbort); // what is unsent
  EXPECT_TRUE(peer.join());
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

} // namespace
} // namespace pycomm::testing
