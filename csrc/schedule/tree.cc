// broadcast and reduce. Ranks are counted from the root: place = (rank - root) mod size, so that the root has place
// 0.
//
// Binomial tree, for small tensors: log2(size) rounds. The parent of a place is the place without its lowest set bit,
// and a place p has the children p + 1, p + 2, p + 4, ... below p's lowest set bit. For three ranks with root 0: 0 ->
// 2, 0 -> 1; for eight: 0 -> 4, 2, 1; 4 -> 6, 5; 2 -> 3; 6 -> 7.
//
// Chain, for large tensors: place 0 -> 1 -> 2 -> ... cut into segments. Every link carries the tensor once, all at the
// same time, while the root of a tree would send it log2(size) times.
//
// A reduction uses the same edges backwards. Partial sums are in scratch or on the wire; only the root's last step
// writes Output. The tree folds a subtree's consecutive places, nearest child first; the chain folds from the last
// place to the root. Either is a fixed order for a given size and root. The small floats are rounded once per fold.
#include <cstdint>
#include <vector>

#include "schedule/algorithms.h"
#include "schedule/schedule_builder.h"

namespace pycomm {
namespace {

struct Tree {
  int32_t parent = -1; ///< a rank; -1 on the root
  std::vector<int32_t> children; ///< ranks, nearest first

  Tree(int32_t rank, int32_t size, int32_t root) {
    const int32_t place = (rank - root + size) % size;
    const auto rankAt = [&](int64_t at) { return static_cast<int32_t>((at + root) % size); };
    int64_t bit = 1;
    for (; bit < size && (place & bit) == 0; bit *= 2) {
      if (place + bit < size) {
        children.push_back(rankAt(place + bit));
      }
    }
    if (place != 0) {
      parent = rankAt(place - bit);
    }
  }
};

/// Neighbours in the chain; -1 if there is none.
struct Chain {
  int32_t toward_root = -1;
  int32_t away = -1;

  Chain(int32_t rank, int32_t size, int32_t root) {
    const int32_t place = (rank - root + size) % size;
    if (place > 0) {
      toward_root = (rank - 1 + size) % size;
    }
    if (place < size - 1) {
      away = (rank + 1) % size;
    }
  }
};

} // namespace

Schedule binomialBroadcast(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::BinomialTree);
  const Tree tree(request.rank, request.size, request.root);
  const Run whole = {0, request.numel};
  const int64_t segments = builder.segmentCount(request.numel, request.dtype);
  for (int64_t s = 0; s < segments; ++s) {
    const Run segment = splitBalanced(whole, segments, s);
    const bool root = tree.parent < 0;
    const StepId arrived = root ? kNoStep : builder.recv(tree.parent, outputRegion(segment));
    // The farthest child has the deepest subtree, so its frames are sent first.
    for (auto child = tree.children.rbegin(); child != tree.children.rend(); ++child) {
      builder.send(root ? inputRegion(segment) : outputRegion(segment), *child, {arrived});
    }
  }
  if (tree.parent < 0) {
    builder.copy(inputRegion(whole), outputRegion(whole));
  }
  return std::move(builder).finish();
}

Schedule binomialReduce(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::BinomialTree);
  const Tree tree(request.rank, request.size, request.root);
  const Buffer scratch = tree.children.size() > 1 ? builder.addScratch(request.dtype, request.numel) : Buffer::None;
  const int64_t segments = builder.segmentCount(request.numel, request.dtype);
  for (int64_t s = 0; s < segments; ++s) {
    const Run segment = splitBalanced({0, request.numel}, segments, s);
    auto partial = builder.operand(segment);
    for (size_t i = 0; i < tree.children.size(); ++i) {
      const bool last = i + 1 == tree.children.size();
      if (last && tree.parent >= 0) {
        builder.recvReduceSend(tree.children[i], partial, tree.parent);
      } else {
        const Region sum = bufferRegion(last ? Buffer::Output : scratch, segment);
        partial = {sum, builder.recvReduce(tree.children[i], partial, sum, /*final=*/last)};
      }
    }
    if (tree.children.empty()) {
      builder.send(partial.region, tree.parent, {partial.ready});
    }
  }
  return std::move(builder).finish();
}

Schedule chainBroadcast(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::Ring);
  const Chain chain(request.rank, request.size, request.root);
  const Run whole = {0, request.numel};
  const int64_t segments = builder.segmentCount(request.numel, request.dtype);
  for (int64_t s = 0; s < segments; ++s) {
    const Run segment = splitBalanced(whole, segments, s);
    if (chain.toward_root < 0) {
      builder.send(inputRegion(segment), chain.away);
    } else if (chain.away >= 0) {
      builder.recvCopySend(chain.toward_root, outputRegion(segment), chain.away);
    } else {
      builder.recv(chain.toward_root, outputRegion(segment));
    }
  }
  if (chain.toward_root < 0) {
    builder.copy(inputRegion(whole), outputRegion(whole));
  }
  return std::move(builder).finish();
}

Schedule chainReduce(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::Ring);
  const Chain chain(request.rank, request.size, request.root);
  const int64_t segments = builder.segmentCount(request.numel, request.dtype);
  for (int64_t s = 0; s < segments; ++s) {
    const Run segment = splitBalanced({0, request.numel}, segments, s);
    const auto local = builder.operand(segment);
    if (chain.away < 0) {
      builder.send(local.region, chain.toward_root, {local.ready});
    } else if (chain.toward_root >= 0) {
      builder.recvReduceSend(chain.away, local, chain.toward_root);
    } else {
      builder.recvReduce(chain.away, local, outputRegion(segment), /*final=*/true);
    }
  }
  return std::move(builder).finish();
}

} // namespace pycomm
