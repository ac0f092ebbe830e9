#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "idmap/lru_slots.h"

namespace pycomm {

/// Gives any id a row of a table of fixed size: exactly one, at first sight or after some sights, and takes the row of the id that
/// has not been used for the longest if the table is full.
///
/// Ids are mixed (mix.h). The range of mixed ids is divided into equal buckets, and so are the rows: an id's row lies in its
/// bucket. So any number of ranks that divides the number of buckets can share a table, each with whole buckets, and load what
/// another number has saved. The last row of each bucket is shared by all ids without a row of their own.
/// Thread: one at a time.
class IdMap {
 public:
  /// Arrays of `rows` elements, of which only those of this map's buckets are meant; they outlive the map, and are all of its state.
  struct State {
    int64_t* ids; ///< mixed, of each row; LruSlots::kFree for none
    int64_t* last_uses;
    int64_t* candidate_ids; ///< that were seen fewer than `admit_after` times; all three are unused if that is 1
    int64_t* candidate_last_uses;
    int64_t* candidate_counts;
  };
  struct Shape {
    int64_t rows = 0; ///< in this map
    int32_t buckets = 1; ///< in this map
    int32_t first_bucket = 0;
    int32_t all_buckets = 1; ///< a power of two
    int64_t admit_after = 1; ///< how often an id must be seen before it has a row
  };

  /// Throws Error(InvalidArgument) if the shape makes no sense or the state does not fit it.
  IdMap(const Shape& shape, const State& state);

  /// One training step: counts each id, and gives rows to new ones. Rows that were asked for in this step are not taken away.
  /// Throws Error(InvalidArgument), before anything has changed, if an id belongs to no bucket of this map.
  void learn(const int64_t* mixed, size_t count);
  /// The row of each id, from 0; the bucket's shared row for one that has none.
  void find(const int64_t* mixed, size_t count, int64_t* rows) const;
  /// Rows whose id was replaced since the last call, in that order; a row may stand there twice.
  std::vector<int64_t> takeReplaced();
  /// Rows that have an id.
  [[nodiscard]] int64_t used() const noexcept;
  /// Ids that found their bucket full of ids of the same step, since the beginning.
  [[nodiscard]] int64_t turnedAway() const noexcept {
    return turned_away_;
  }

 private:
  struct Bucket {
    LruSlots rows;
    LruSlots candidates;
    int64_t step_began = 0; ///< now() of `rows`
    int64_t candidate_step_began = 0;
  };

  [[nodiscard]] int32_t bucketOf(int64_t mixed) const noexcept;
  void learnOne(Bucket& bucket, int32_t number, int64_t id);
  [[nodiscard]] bool seenOftenEnough(Bucket& bucket, int32_t number, int64_t id);

  const Shape shape_;
  int64_t* const candidate_counts_;
  int32_t bucket_rows_ = 0;
  int shift_ = 0; ///< of a mixed id to its bucket
  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::vector<int64_t> replaced_;
  int64_t turned_away_ = 0;
};

} // namespace pycomm
