#include "proof/sim/sim_loop.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

namespace pycomm::sim {

void SimLoop::post(Task task) {
  if (dead_) {
    return;
  }
  tasks_.push_back(std::move(task));
  wake(timeline_.now());
}

void SimLoop::changed(int fd) {
  if (!dead_ && watches_.count(fd) != 0) {
    maybe_ready_.insert(fd);
    wake(timeline_.now());
  }
}

void SimLoop::resume() {
  stopped_ = false;
  wake(timeline_.now());
}

void SimLoop::kill() noexcept {
  dead_ = true;
  tasks_.clear();
  tickers_.clear();
}

void SimLoop::watch(int fd, uint32_t events, Handler& handler) {
  watches_[fd] = Watch{events, &handler};
  readiness_.setWatcher(fd, this);
  changed(fd);
}

void SimLoop::unwatch(int fd) noexcept {
  if (watches_.erase(fd) != 0) {
    readiness_.setWatcher(fd, nullptr);
    maybe_ready_.erase(fd);
  }
}

void SimLoop::addTicker(Ticker& ticker) {
  tickers_.add(ticker);
  wake(timeline_.now());
}

void SimLoop::wake(TimePoint instant) {
  if (dead_ || stopped_) {
    return;
  }
  instant = std::max({instant, busy_until_, timeline_.now()});
  if (instant >= next_turn_) {
    return;
  }
  next_turn_ = instant;
  const int64_t serial = ++turn_serial_;
  timeline_.at(instant, [this, serial] {
    if (serial == turn_serial_) {
      turn();
    }
  });
}

uint32_t SimLoop::ready(int fd) const {
  const auto found = watches_.find(fd);
  return found == watches_.end() ? 0 : readiness_.eventsOf(fd) & (found->second.events | EPOLLERR | EPOLLHUP);
}

void SimLoop::turn() {
  next_turn_ = TimePoint::max();
  if (dead_ || stopped_) {
    return;
  }
  std::vector<std::pair<int, uint32_t>> events;
  for (const int fd : maybe_ready_) {
    const uint32_t what = ready(fd);
    if (what != 0) {
      events.emplace_back(fd, what);
    }
  }
  maybe_ready_.clear();
  for (size_t i = events.size(); i > 1; --i) {
    std::swap(events[i - 1], events[static_cast<size_t>(random_.below(static_cast<int64_t>(i)))]);
  }
  for (const auto& event : events) {
    const auto found = watches_.find(event.first); // an earlier handler may have unwatched it
    if (found != watches_.end()) {
      Handler& handler = *found->second.handler;
      guarded(handler, [&] { handler.onReady(event.second); });
    }
    if (dead_) {
      return;
    }
    maybe_ready_.insert(event.first); // level-triggered: asked again next turn
  }
  std::vector<Task> tasks = std::exchange(tasks_, {});
  for (Task& task : tasks) {
    task();
  }
  const TimePoint now = timeline_.now();
  tickers_.tick(now);

  busy_until_ = now + Nanos(random_.within(pace_.turn_low.count(), pace_.turn_high.count()));
  for (auto at = maybe_ready_.begin(); at != maybe_ready_.end();) {
    at = ready(*at) != 0 ? std::next(at) : maybe_ready_.erase(at);
  }
  if (!tasks_.empty() || !maybe_ready_.empty()) {
    wake(now);
    return;
  }
  const TimePoint next = tickers_.nextTick();
  if (next == Ticker::kAtOnce) {
    wake(now);
  } else if (next != TimePoint::max()) {
    wake(next + Nanos(random_.below(pace_.oversleep.count() + 1)));
  }
}

} // namespace pycomm::sim
