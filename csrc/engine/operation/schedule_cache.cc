#include "engine/operation/schedule_cache.h"

#include <algorithm>
#include <string>

#include "base/log.h"
#include "schedule/make_schedule.h"

namespace pycomm {
namespace {

bool same(const ScheduleRequest& a, const ScheduleRequest& b) {
  return a.kind == b.kind && a.algorithm == b.algorithm && a.root == b.root && a.dtype == b.dtype &&
      a.codec == b.codec && a.reduce_op == b.reduce_op && a.numel == b.numel && a.segment_nbytes == b.segment_nbytes &&
      a.counts == b.counts && a.recv_counts == b.recv_counts && a.pipeline_frames == b.pipeline_frames;
}

} // namespace

ScheduleRequest ScheduleCache::ours(const ScheduleRequest& schedule) const {
  ScheduleRequest filled = schedule;
  filled.rank = roster_.identity.rank;
  filled.size = roster_.identity.size;
  filled.topology = &roster_.topology;
  return filled;
}

std::shared_ptr<const PreparedSchedule> ScheduleCache::get(const ScheduleRequest& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return same(entry.request, request); });
  if (found != entries_.end()) {
    entries_.splice(entries_.begin(), entries_, found);
    return entries_.front().prepared;
  }
  const auto prepared = prepare(makeSchedule(request));
  logChoice(request, prepared->schedule.algorithm);
  if (prepared->nbytes > kKeptNbytes) {
    return prepared;
  }
  entries_.push_front(Entry{request, prepared});
  nbytes_ += prepared->nbytes;
  while (entries_.size() > kKept || nbytes_ > kKeptNbytes) {
    nbytes_ -= entries_.back().prepared->nbytes;
    entries_.pop_back();
  }
  return prepared;
}

// With mutex_.
void ScheduleCache::logChoice(const ScheduleRequest& request, Algorithm algorithm) {
  const bool chosen = request.kind != Collective::Send && request.kind != Collective::Recv && request.size > 1;
  if (!chosen || !logEnabled(LogLevel::Info)) {
    return;
  }
  const SelectionKey key = selectionKey(request);
  int size_class = 0;
  while (size_class < 62 && (int64_t{1} << size_class) < key.nbytes) {
    ++size_class;
  }
  if (!logged_.emplace(key.kind, size_class).second) {
    return;
  }
  const std::string why = request.algorithm != Algorithm::Auto ? "the algorithm option" : whySelected(key);
  log(LogLevel::Info,
      "group " + roster_.identity.name + ": " + collectiveName(key.kind) + " of " + std::to_string(key.nbytes) +
          " bytes uses " + algorithmName(algorithm) + ": " + why + " (" + roster_.topology.text() + ")");
}

} // namespace pycomm
