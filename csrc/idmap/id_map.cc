#include "idmap/id_map.h"

#include <limits>
#include <string>
#include <utility>

#include "base/error.h"

namespace pycomm {
namespace {

void checkMap(bool holds, const std::string& sentence) {
  if (!holds) {
    ErrorRecord record;
    record.code = ErrorCode::InvalidArgument;
    record.summary = sentence;
    throw Error(record);
  }
}

} // namespace

IdMap::IdMap(const Shape& shape, const State& state) : shape_(shape), candidate_counts_(state.candidate_counts) {
  const int32_t all = shape.all_buckets;
  checkMap(all > 0 && all <= 1024 && (all & (all - 1)) == 0, "An id map has 1, 2, 4, … or 1024 buckets.");
  checkMap(
      shape.buckets > 0 && shape.first_bucket >= 0 && shape.first_bucket <= all - shape.buckets,
      "An id map's own buckets are not among all buckets.");
  const int64_t each = shape.rows / shape.buckets;
  checkMap(
      shape.rows % shape.buckets == 0 && each >= 2 && each < std::numeric_limits<int32_t>::max(),
      std::to_string(shape.rows) + " rows cannot be divided into " + std::to_string(shape.buckets) +
          " equal buckets of 2 rows or more.");
  checkMap(shape.admit_after >= 1, "An id must be seen once at least before it has a row.");
  bucket_rows_ = static_cast<int32_t>(each);
  shift_ = 63;
  for (int32_t left = all; left > 1; left /= 2) {
    --shift_;
  }
  for (int32_t number = 0; number < shape.buckets; ++number) {
    const int64_t at = number * each;
    const bool counts = shape.admit_after > 1;
    // The last row of a bucket is the shared one.
    buckets_.push_back(
        std::make_unique<Bucket>(Bucket{
            LruSlots(state.ids + at, state.last_uses + at, bucket_rows_ - 1),
            counts ? LruSlots(state.candidate_ids + at, state.candidate_last_uses + at, bucket_rows_)
                   : LruSlots(nullptr, nullptr, 0)}));
    for (int32_t row = 0; row < bucket_rows_ - 1; ++row) {
      const int64_t id = state.ids[at + row];
      checkMap(
          id == LruSlots::kFree || bucketOf(id) == number,
          "The state of an id map is of another place: row " + std::to_string(at + row) +
              " has an id of another bucket.");
    }
  }
}

int32_t IdMap::bucketOf(int64_t mixed) const noexcept {
  return static_cast<int32_t>(mixed >> shift_) - shape_.first_bucket;
}

void IdMap::learn(const int64_t* mixed, size_t count) {
  for (size_t at = 0; at < count; ++at) {
    const int32_t number = bucketOf(mixed[at]);
    checkMap(
        mixed[at] >= 0 && number >= 0 && number < shape_.buckets,
        "Mixed id " + std::to_string(mixed[at]) + " belongs to bucket " + std::to_string(mixed[at] >> shift_) +
            ", which another rank has.");
  }
  for (const auto& bucket : buckets_) {
    bucket->step_began = bucket->rows.now();
    bucket->candidate_step_began = bucket->candidates.now();
  }
  for (size_t at = 0; at < count; ++at) {
    const int32_t number = bucketOf(mixed[at]);
    learnOne(*buckets_[number], number, mixed[at]);
  }
}

void IdMap::learnOne(Bucket& bucket, int32_t number, int64_t id) {
  LruSlots& rows = bucket.rows;
  if (const int32_t row = rows.find(id); row != LruSlots::kNone) {
    if (rows.lastUse(row) < bucket.step_began) {
      rows.use(row);
    }
    return;
  }
  if (!seenOftenEnough(bucket, number, id)) {
    return;
  }
  if (rows.insert(id) == LruSlots::kNone) {
    const int32_t oldest = rows.oldest();
    if (rows.lastUse(oldest) >= bucket.step_began) {
      ++turned_away_;
      return; // it keeps its count, and has a row at its next sight
    }
    replaced_.push_back(int64_t{number} * bucket_rows_ + oldest);
    rows.erase(oldest);
    rows.insert(id);
  }
  if (const int32_t slot = bucket.candidates.find(id); slot != LruSlots::kNone) {
    bucket.candidates.erase(slot);
  }
}

bool IdMap::seenOftenEnough(Bucket& bucket, int32_t number, int64_t id) {
  if (shape_.admit_after == 1) {
    return true;
  }
  LruSlots& candidates = bucket.candidates;
  int64_t* const counts = candidate_counts_ + int64_t{number} * bucket_rows_;
  int32_t slot = candidates.find(id);
  if (slot == LruSlots::kNone) {
    slot = candidates.insert(id);
    if (slot == LruSlots::kNone) {
      const int32_t oldest = candidates.oldest();
      if (candidates.lastUse(oldest) >= bucket.candidate_step_began) {
        ++turned_away_;
        return false;
      }
      candidates.erase(oldest);
      slot = candidates.insert(id);
    }
    counts[slot] = 0;
  } else if (candidates.lastUse(slot) < bucket.candidate_step_began) {
    candidates.use(slot);
  }
  return ++counts[slot] >= shape_.admit_after;
}

void IdMap::find(const int64_t* mixed, size_t count, int64_t* rows) const {
  for (size_t at = 0; at < count; ++at) {
    const int32_t number = bucketOf(mixed[at]);
    checkMap(
        mixed[at] >= 0 && number >= 0 && number < shape_.buckets,
        "Mixed id " + std::to_string(mixed[at]) + " is of a bucket that another rank has.");
    const int32_t row = buckets_[number]->rows.find(mixed[at]);
    rows[at] = int64_t{number} * bucket_rows_ + (row == LruSlots::kNone ? bucket_rows_ - 1 : row);
  }
}

std::vector<int64_t> IdMap::takeReplaced() {
  return std::exchange(replaced_, {});
}

int64_t IdMap::used() const noexcept {
  int64_t used = 0;
  for (const auto& bucket : buckets_) {
    used += bucket->rows.used();
  }
  return used;
}

} // namespace pycomm
