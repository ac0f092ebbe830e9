// What a peer may do to the words of a ring: anything.
#include "transport/memory/shared_ring.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "base/error.h"
#include "transport/memory/shared_link.h"
#include "transport/net/socket_link.h"

namespace pycomm {
namespace {

constexpr size_t kRingNbytes = 4096;
constexpr size_t kPage = 4096;
constexpr std::byte kOutside{0xEE}; // never sent

// A ring between two pages that nobody may touch; what is left of the page of its words is filled with what is never sent.
class FencedRing {
 public:
  FencedRing() {
    void* mapped = ::mmap(nullptr, whole(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED ||
        ::mprotect(static_cast<std::byte*>(mapped) + kPage, inside(), PROT_READ | PROT_WRITE) != 0) {
      throw std::runtime_error("no memory could be mapped");
    }
    fence_ = static_cast<std::byte*>(mapped);
    clear();
  }
  ~FencedRing() {
    ::munmap(fence_, whole());
  }
  FencedRing(const FencedRing&) = delete;
  FencedRing& operator=(const FencedRing&) = delete;

  [[nodiscard]] RingMemory memory() const {
    return {fence_ + kPage, kRingNbytes};
  }
  void clear() {
    std::memset(fence_ + kPage, 0, inside());
    std::memset(rest(), static_cast<int>(kOutside), restNbytes());
  }
  [[nodiscard]] bool restIsWhole() const {
    return std::all_of(rest(), rest() + restNbytes(), [](std::byte each) { return each == kOutside; });
  }

 private:
  static constexpr size_t inside() {
    return RingMemory::totalNbytes(kRingNbytes);
  }
  static constexpr size_t whole() {
    return kPage + inside() + kPage;
  }
  [[nodiscard]] std::byte* rest() const {
    return fence_ + kPage + sizeof(RingWords);
  }
  static constexpr size_t restNbytes() {
    return RingMemory::kWordsNbytes - sizeof(RingWords);
  }

  std::byte* fence_ = nullptr;
};

struct RingEnds {
  std::unique_ptr<SharedLink> writer;
  std::unique_ptr<SharedLink> reader;
};

RingEnds endsOf(const FencedRing& ring) {
  int bells[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, bells) != 0) {
    throw std::runtime_error("no pair of sockets could be made");
  }
  RingEnds ends;
  ends.writer = std::make_unique<SharedLink>(
      std::make_unique<SocketLink>(UniqueFd(bells[0])), SharedLink::Rings{nullptr, ring.memory(), std::nullopt});
  ends.reader = std::make_unique<SharedLink>(
      std::make_unique<SocketLink>(UniqueFd(bells[1])), SharedLink::Rings{nullptr, std::nullopt, ring.memory()});
  return ends;
}

using Random = std::mt19937_64;

uint64_t lie(Random& random, uint64_t truth) {
  switch (random() % 6) {
    case 0:
      return random();
    case 1:
      return random() % (3 * kRingNbytes);
    case 2:
      return truth + random() % (2 * kRingNbytes);
    case 3:
      return truth - random() % (2 * kRingNbytes);
    case 4:
      return truth ^ (uint64_t{1} << (random() % 64));
    default:
      return ~uint64_t{0} - random() % 3;
  }
}

void scribble(Random& random, RingWords& words) {
  switch (random() % 4) {
    case 0:
      words.written = lie(random, words.written);
      return;
    case 1:
      words.taken = lie(random, words.taken);
      return;
    case 2:
      words.reader_awake = static_cast<uint32_t>(random());
      return;
    default:
      words.writer_awake = static_cast<uint32_t>(random());
  }
}

size_t someNbytes(Random& random) {
  return random() % (random() % 2 == 0 ? 64 : 3 * kRingNbytes);
}

// One try of one end; false once that end has found a lie. Buffers are as long as they say: a sanitizer sees what goes beyond.
bool tryOnce(Random& random, RingEnds& ends, size_t& wrong) {
  try {
    if (random() % 2 == 0) {
      const std::vector<std::byte> bytes(someNbytes(random) + 1, static_cast<std::byte>(random() % 0xE0));
      const ConstBufferView view(bytes.data(), bytes.size());
      const Progress progress = ends.writer->tryWrite(&view, 1);
      wrong += progress.nbytes > std::min(bytes.size(), kRingNbytes) ? 1U : 0U;
    } else {
      std::vector<std::byte> into(someNbytes(random) + 1);
      const Progress progress = ends.reader->tryRead({into.data(), into.size()});
      wrong += progress.nbytes > std::min(into.size(), kRingNbytes) ? 1U : 0U;
      const auto end = into.begin() + static_cast<std::ptrdiff_t>(std::min(progress.nbytes, into.size()));
      wrong += std::find(into.begin(), end, kOutside) != end ? 1U : 0U;
    }
    if (random() % 8 == 0) {
      (void)ends.writer->canWrite();
      (void)ends.reader->canRead();
      (void)ends.writer->writeSleeps();
      (void)ends.reader->readSleeps();
    }
    return true;
  } catch (const Error& error) {
    wrong += error.record().code != ErrorCode::ProtocolViolation ? 1U : 0U;
    return false;
  }
}

// Whatever stands in the words, a try ends, moves no byte from or to outside of the ring, and fails in no other way than by saying so.
TEST(SharedRing, SurvivesWhateverItsWordsSay) {
  FencedRing ring;
  int found = 0;
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    Random random(seed);
    ring.clear();
    RingEnds ends = endsOf(ring);
    size_t wrong = 0;
    bool honest = true;
    for (int step = 0; step < 60; ++step) {
      if (step > 10 && random() % 6 == 0) {
        scribble(random, ring.memory().words());
        honest = false;
      }
      if (!tryOnce(random, ends, wrong)) {
        ASSERT_FALSE(honest) << "seed " << seed << ": nobody has lied";
        ++found;
        break;
      }
    }
    ASSERT_EQ(wrong, 0U) << "seed " << seed;
    ASSERT_TRUE(ring.restIsWhole()) << "seed " << seed;
  }
  EXPECT_GT(found, 1000); // most lies can be seen to be some
}

} // namespace
} // namespace pycomm
