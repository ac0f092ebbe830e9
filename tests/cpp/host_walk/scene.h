#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/operation/operation.h"
#include "host_walk/walk.h"
#include "host_walk/walked_host.h"

namespace pycomm::testing {

/// One operation of all ranks.
struct Act {
  Collective kind = Collective::Barrier;
  uint64_t rounds = 0; ///< 0: it fits the slots
  ReduceOp op = ReduceOp::None;
  bool in_place = false; ///< its tensors lie where all ranks reach them
  int root = -1;
};

/// What the ranks of a group do.
struct Plot {
  int size = 2;
  std::vector<Act> acts;
  int leaver =
      -1; ///< this rank may leave, or fail, between any two of its steps, and then the others may at any time fail
  bool sleeps = false; ///< ranks that wait sleep until another rings
  bool enters =
      true; ///< also the orders in which they enter operations and look who has: needed if one leaves, or for several operations
  int differs = -1; ///< this rank asks for other operations than all others do
  int late = -1; ///< this rank begins once the others have done all that they can do without it
};

/// Runs a Plot on HostPlanes, one for each rank, over one memory. Every element of every operation has a value of its own, and when an operation has
/// ended well on a rank, that rank looks at all elements of its result at once, and then has its tensors for itself: it writes over them.
class HostScene : public Scene {
 public:
  explicit HostScene(Plot plot);

  void reset() override;
  void body(int rank) override;
  [[nodiscard]] uint64_t hash() const override;
  void ended() override;

  /// Whose word it is, and whether others look at it.
  struct Word {
    const char* name = "";
    int owner = -1;
    bool wakes = false; ///< only ranks that sleep need it
    bool slot = false;
    bool counter = false; ///< others only ask whether it is as high as something, and it only rises
    bool of_round = false; ///< a counter of rounds
    bool left = false; ///< HostProgress::left
    bool written = false; ///< HostProgress::writes
    bool bell = false;
  };
  [[nodiscard]] Word wordAt(const void* word) const;
  [[nodiscard]] const Plot& plot() const noexcept {
    return plot_;
  }
  [[nodiscard]] bool noticed(int rank) const noexcept {
    return selves_[static_cast<size_t>(rank)].noticed;
  }
  /// This rank has stored for whom it waits; or it has read its bell, and will ask whether that was rung since.
  void expects() noexcept;
  void readBell(uint32_t rung) noexcept;
  /// Of what this rank knows, all that is not in memory that others can see.
  [[nodiscard]] uint64_t stateOf(int rank) const;
  /// Whether bytes lie behind this fault point that others read or write.
  [[nodiscard]] bool touchesBytes(const char* site) const;
  /// The rank has just read or written such bytes of a round, and nothing since.
  [[nodiscard]] bool& touched() noexcept {
    return touched_;
  }
  /// This rank needs this counter of another one to be so high, and it is not.
  void lacks(const WalkedWord<uint64_t>& counter, uint64_t bound);
  [[nodiscard]] static HostScene& current() noexcept {
    return *current_;
  }

 private:
  struct Tensors {
    float* input = nullptr;
    float* output = nullptr;
  };
  struct Lack {
    const WalkedWord<uint64_t>* counter;
    uint64_t bound;
  };
  struct Self {
    HostPlane* plane = nullptr;
    std::vector<std::shared_ptr<Operation>> operations;
    size_t ended = 0; ///< of them
    uint64_t ended_well = 0; ///< bits
    uint64_t must_end_well = 0;
    uint64_t must_fail = 0;
    bool left = false;
    bool fails = false; ///< left not in good order
    bool noticed = false;
    std::optional<uint32_t> rung; ///< its bell, when it read that before it sleeps
    std::vector<Lack> lacks; ///< since it expects others to ring
  };

  [[nodiscard]] int64_t numelOf(const Act& act) const noexcept;
  [[nodiscard]] size_t inputNumel(const Act& act) const noexcept;
  [[nodiscard]] size_t outputNumel(const Act& act) const noexcept;
  [[nodiscard]] Tensors& tensorsOf(int rank, size_t act) noexcept {
    return tensors_[static_cast<size_t>(rank) * plot_.acts.size() + act];
  }
  [[nodiscard]] float expected(size_t act, int rank, size_t i) const;
  [[nodiscard]] Operation::Request requestOf(size_t act, int rank);
  [[nodiscard]] uint64_t progressOf(int rank) const;
  [[nodiscard]] bool groupFails(int rank) const noexcept;
  [[nodiscard]] int waysOf(int rank) const noexcept;
  void look(int rank);
  void checkNobodySleepsFor(int rank) const;
  void checkNotAstray(int rank) const;
  void leave(int rank, bool fails);

  static HostScene* current_;
  const Plot plot_;
  std::shared_ptr<SharedArena> arena_;
  std::vector<std::shared_ptr<SharedHeap>> heaps_;
  std::vector<BufferView> ranges_;
  std::vector<std::vector<float>> ordinary_;
  std::vector<Tensors> tensors_; ///< by rank and act
  std::vector<Self> selves_;
  bool touched_ = false; ///< by the rank that runs: never across a pause
};

} // namespace pycomm::testing
