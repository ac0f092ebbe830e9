#pragma once

#include <cstddef>
#include <vector>

#include "base/deadline.h"
#include "engine/loop/loop.h"

namespace pycomm {

/// The tickers of a loop, in the order in which they were added. A ticker may add and remove tickers, itself among them, while it is
/// called. What a ticker throws goes to it.
///
/// The loop's thread only.
class Tickers final {
 public:
  void add(Loop::Ticker& ticker) {
    tickers_.push_back(&ticker);
  }
  void remove(Loop::Ticker& ticker) noexcept;
  void clear() noexcept {
    tickers_.clear();
  }

  /// When the first wants to be called; TimePoint::max() for never.
  [[nodiscard]] TimePoint nextTick() const noexcept;
  /// Calls those whose time has come, and one of those that have work. Whether there were any.
  bool tick(TimePoint now) noexcept;
  /// The last tick() has left work.
  [[nodiscard]] bool haveWork() const noexcept {
    return have_work_;
  }

  // All of them as one, for the rest of Loop::Ticker:
  [[nodiscard]] Loop::Ticker::Look look() noexcept;
  [[nodiscard]] bool sharesMemory() const noexcept;
  [[nodiscard]] bool pollShared() noexcept;
  [[nodiscard]] bool restShared() noexcept;

 private:
  std::vector<Loop::Ticker*> tickers_; ///< each alive until remove(); null: removed, until the end of tick()
  size_t next_worker_ = 0; ///< the first place to look for one that has work
  bool have_work_ = false;
};

} // namespace pycomm
