#include "engine/loop/tickers.h"

#include <algorithm>

namespace pycomm {

void Tickers::remove(Loop::Ticker& ticker) noexcept {
  // Not erased: a ticker that is called right now may have asked for it. tick() sweeps the holes.
  std::replace(tickers_.begin(), tickers_.end(), &ticker, static_cast<Loop::Ticker*>(nullptr));
}

TimePoint Tickers::nextTick() const noexcept {
  TimePoint next = TimePoint::max();
  for (const Loop::Ticker* ticker : tickers_) {
    if (ticker != nullptr) {
      next = std::min(next, ticker->nextTick());
    }
  }
  return next;
}

bool Tickers::tick(TimePoint now) noexcept {
  bool any = false;
  size_t worker = tickers_.size();
  size_t workers = 0;
  for (size_t i = 0; i < tickers_.size(); ++i) {
    const TimePoint next = tickers_[i] == nullptr ? TimePoint::max() : tickers_[i]->nextTick();
    if (next == Loop::Ticker::kAtOnce) {
      if (workers++ == 0 || (worker < next_worker_ && i >= next_worker_)) {
        worker = i;
      }
    } else if (next <= now) {
      Loop::Ticker& ticker = *tickers_[i];
      Loop::guarded(ticker, [&] { ticker.tick(now); });
      any = true;
    }
  }
  have_work_ = workers > 1;
  if (workers > 0 && tickers_[worker] != nullptr) {
    Loop::Ticker& ticker = *tickers_[worker];
    Loop::guarded(ticker, [&] { ticker.tick(now); });
    next_worker_ = worker + 1;
    have_work_ = have_work_ || (tickers_[worker] != nullptr && ticker.nextTick() == Loop::Ticker::kAtOnce);
    any = true;
  }
  tickers_.erase(std::remove(tickers_.begin(), tickers_.end(), nullptr), tickers_.end());
  return any;
}

Loop::Ticker::Look Tickers::look() noexcept {
  using Look = Loop::Ticker::Look;
  Look all = Look::Nothing;
  for (size_t i = 0; i < tickers_.size(); ++i) {
    Look one = Look::Nothing;
    if (tickers_[i] != nullptr) {
      Loop::guarded(*tickers_[i], [&] { one = tickers_[i]->look(); });
    }
    if (one == Look::Moved) {
      return one;
    }
    all = one == Look::NotYet ? one : all;
  }
  return all;
}

bool Tickers::sharesMemory() const noexcept {
  return std::any_of(tickers_.begin(), tickers_.end(), [](const Loop::Ticker* ticker) {
    return ticker != nullptr && ticker->sharesMemory();
  });
}

bool Tickers::pollShared() noexcept {
  bool moved = false;
  for (size_t i = 0; i < tickers_.size(); ++i) {
    if (tickers_[i] != nullptr) {
      Loop::guarded(*tickers_[i], [&] { moved = tickers_[i]->pollShared() || moved; });
    }
  }
  return moved;
}

bool Tickers::restShared() noexcept {
  return std::all_of(
      tickers_.begin(), tickers_.end(), [](Loop::Ticker* ticker) { return ticker == nullptr || ticker->restShared(); });
}

} // namespace pycomm
