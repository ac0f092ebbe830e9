#include "schedule/select.h"
#include <cstdlib>

namespace pycomm {
namespace {

// Up to here a round costs latency, not bandwidth: log2(size) rounds of everything beat 2 * size - 2 of a part.
constexpr int64_t kSmallAllReduceNbytes = 32 << 10;

constexpr int32_t kMaxDirectSize = 64;

/// For a broadcast or a reduction. A tree's root moves each segment ceil(log2(size)) times; in a chain it moves each
/// one once, and the last one arrives size - 2 frames later.
Algorithm treeOrChain(int64_t segments, int32_t size) {
  int64_t rounds = 0;
  while ((int64_t{1} << rounds) < size) {
    ++rounds;
  }
  // segments * rounds <= segments + size - 2, without overflow
  return rounds <= 1 || segments <= (size - 2) / (rounds - 1) ? Algorithm::BinomialTree : Algorithm::Ring;
}

} // namespace

Algorithm selectAlgorithm(const SelectionKey& key) noexcept {
  switch (key.kind) {
    case Collective::AllReduce:
      // One fp32 accumulator and one rounding, where the ring would round at each of its size - 1 hops. The bytes are the
      // ring's; the messages are size times as many and the scratch grows with them, hence the bound.
      if (key.encoded || (key.small_float_sum && key.size > 2 && key.size <= kMaxDirectSize)) {
        return Algorithm::Direct;
      }
      return key.nbytes <= kSmallAllReduceNbytes ? Algorithm::RecursiveDoubling : Algorithm::Ring;
    case Collective::Broadcast:
    case Collective::Reduce:
      return treeOrChain(key.nbytes == 0 ? 1 : (key.nbytes - 1) / key.segment_nbytes + 1, key.size);
    case Collective::AllGather:
    case Collective::ReduceScatter:
      if (const char* e = std::getenv("SCHED_ALG")) return static_cast<Algorithm>(std::atoi(e));
      return Algorithm::Ring;
    case Collective::Barrier:
      return Algorithm::RecursiveDoubling;
    case Collective::AllToAll:
      return Algorithm::Pairwise;
    case Collective::Gather:
    case Collective::Scatter:
    case Collective::Send:
    case Collective::Recv:
      return Algorithm::Direct;
  }
  return Algorithm::Direct; // a value outside the enumeration; makeSchedule has refused it before
}

} // namespace pycomm
