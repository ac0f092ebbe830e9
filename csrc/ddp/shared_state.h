#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace pycomm {

/// What the next step reads, and no operation of it shows: if it differed between ranks, averages would be wrong without an error.
struct SharedValues {
  static constexpr int kUnscaled = std::numeric_limits<int>::max();

  explicit SharedValues(std::vector<bool> trained_now)
      : exponents(trained_now.size(), kUnscaled), trained(std::move(trained_now)) {
    for (size_t param = trained.size(); param-- > 0;) {
      order.push_back(param);
    }
  }

  std::vector<int> exponents; ///< by parameter: the s of its last fp16 scale, or kUnscaled. See ScaledWire in wire.cc
  std::vector<size_t>
      order; ///< of all parameters, as their gradients are expected; at first the reverse order of registration
  bool agreed = false; ///< that order is the one of rank 0's first reduction
  bool ordered = false; ///< the first reduction is over, so an order can be agreed on
  int64_t accumulated = 0; ///< passes since the last one that reduced
  bool has_local = false; ///< likewise: some were here, not those of other ranks alone, or in no_sync()
  int64_t passes =
      0; ///< all passes, those that only accumulate included: a rank that is a pass ahead or behind shows by it
  std::vector<bool> trained; ///< by parameter
  bool counting =
      false; ///< a static graph's gradients are still counted: each rank's own, as one may have had no batch so far
  bool knows_used = false; ///< a static graph's used parameters have been exchanged

  /// Of the members that are the same on all ranks: what parts() has a hash of, in this order. PassFailure's text has the name of one that differs.
  static constexpr std::array<const char*, 7> kNames = {
      "the fp16 scales",
      "the order of buckets",
      "whether that order has been agreed on",
      "whether a first reduction is over",
      "the number of passes",
      "which parameters are trained",
      "whether used parameters are known"};
  using Parts = std::array<uint32_t, kNames.size()>;
  [[nodiscard]] Parts parts() const;
};

/// SharedValues in two halves: those that passes read, and those that the pass under way will leave. Reducer::commit() makes the one of the
/// other, so a pass that fails anywhere changes none of them. Averages and residuals are elsewhere, and may have changed by then: see Wire.
///
/// Not thread-safe; the reducer's turn (PassLock) guards it.
class SharedState {
 public:
  explicit SharedState(std::vector<bool> trained) : now_(std::move(trained)), next_(now_) {}

  [[nodiscard]] const SharedValues& now() const noexcept {
    return now_;
  }
  /// Of the pass under way.
  [[nodiscard]] SharedValues& next() noexcept {
    return next_;
  }
  [[nodiscard]] const SharedValues& next() const noexcept {
    return next_;
  }
  void commit() {
    now_ = next_;
    ++version_;
  }
  /// The pass under way leaves nothing, but what it has counted for this rank.
  void giveUp() {
    now_.counting = next_.counting;
    next_ = now_;
  }
  /// A change that is no step's: between passes, or by a pass that reduces nothing.
  void change(const std::function<void(SharedValues&)>& how) {
    how(now_);
    how(next_);
    ++version_;
  }
  /// Another one whenever now() has changed.
  [[nodiscard]] uint64_t version() const noexcept {
    return version_;
  }
  /// As constructed, except for what the program says: which parameters are trained, and that the graph is static.
  void reset(bool static_graph) {
    now_ = SharedValues(now_.trained);
    now_.counting = static_graph;
    next_ = now_;
    ++version_;
  }

 private:
  SharedValues now_;
  SharedValues next_;
  uint64_t version_ = 1;
};

} // namespace pycomm
