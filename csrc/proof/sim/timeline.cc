#include "proof/sim/timeline.h"

#include <algorithm>
#include <utility>

namespace pycomm::sim {

void Timeline::at(TimePoint instant, Event event) {
  heap_.push_back(Entry{std::max(instant, now_), next_serial_++, std::move(event)});
  std::push_heap(heap_.begin(), heap_.end(), later);
}

bool Timeline::step(TimePoint horizon) {
  if (heap_.empty() || heap_.front().instant > horizon) {
    return false;
  }
  std::pop_heap(heap_.begin(), heap_.end(), later);
  const Entry entry = std::move(heap_.back());
  heap_.pop_back();
  now_ = entry.instant;
  ++events_run_;
  entry.event();
  return true;
}

} // namespace pycomm::sim
