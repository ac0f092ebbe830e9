#include "idmap/id_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "base/error.h"
#include "idmap/mix.h"

namespace pycomm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Table {
  explicit Table(int64_t rows)
      : ids(rows, LruSlots::kFree),
        uses(rows),
        candidate_ids(rows, LruSlots::kFree),
        candidate_uses(rows),
        counts(rows) {}
  IdMap::State at(int64_t row) {
    return {&ids[row], &uses[row], &candidate_ids[row], &candidate_uses[row], &counts[row]};
  }
  /// Those of some rows: each with its count, in the order of their last uses. Their slots are nobody's business.
  [[nodiscard]] std::vector<std::pair<int64_t, int64_t>> candidates(int64_t first_row, int64_t rows) const {
    std::map<int64_t, std::pair<int64_t, int64_t>> by_use;
    for (int64_t slot = first_row; slot < first_row + rows; ++slot) {
      if (candidate_ids[slot] != LruSlots::kFree) {
        by_use[candidate_uses[slot]] = {candidate_ids[slot], counts[slot]};
      }
    }
    std::vector<std::pair<int64_t, int64_t>> found;
    for (const auto& [use, candidate] : by_use) {
      found.push_back(candidate);
    }
    return found;
  }
  std::vector<int64_t> ids, uses, candidate_ids, candidate_uses, counts;
};

IdMap::Shape shapeOf(int64_t rows, int32_t buckets = 1, int64_t admit_after = 1) {
  IdMap::Shape shape;
  shape.rows = rows;
  shape.buckets = buckets;
  shape.all_buckets = buckets;
  shape.admit_after = admit_after;
  return shape;
}

std::vector<int64_t> step(IdMap& map, const std::vector<int64_t>& ids) {
  map.learn(ids.data(), ids.size());
  std::vector<int64_t> rows(ids.size());
  map.find(ids.data(), ids.size(), rows.data());
  return rows;
}

/// The same rules with std::map, for one bucket and admission at first sight.
struct Reference {
  size_t rows;
  std::map<int64_t, int64_t> row_of, used;
  int64_t clock = 0;
  std::vector<int64_t> replaced;

  std::vector<int64_t> step(const std::vector<int64_t>& ids) {
    const int64_t began = clock;
    for (const int64_t id : ids) {
      if (row_of.count(id) == 0) {
        if (row_of.size() < rows - 1) {
          const auto row = static_cast<int64_t>(row_of.size());
          row_of[id] = row;
        } else {
          const auto oldest = std::min_element(
              used.begin(), used.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
          if (oldest->second >= began) {
            continue;
          }
          replaced.push_back(row_of.at(oldest->first));
          row_of[id] = row_of.at(oldest->first);
          row_of.erase(oldest->first);
          used.erase(oldest);
        }
        used[id] = clock++;
      } else if (used.at(id) < began) {
        used.at(id) = clock++;
      }
    }
    std::vector<int64_t> found;
    for (const int64_t id : ids) {
      found.push_back(row_of.count(id) != 0 ? row_of.at(id) : static_cast<int64_t>(rows) - 1);
    }
    return found;
  }
};

TEST(IdMap, AgreesWithAMapOfTheLibrary) {
  std::mt19937 random(2);
  for (int program = 0; program < 60; ++program) {
    const int64_t rows = 2 + random() % 12;
    Table table(rows);
    IdMap map(shapeOf(rows), table.at(0));
    Reference reference{static_cast<size_t>(rows), {}, {}, 0, {}};
    for (int number = 0; number < 60; ++number) {
      std::vector<int64_t> ids(random() % 12);
      std::generate(ids.begin(), ids.end(), [&] { return static_cast<int64_t>(mixId(random() % 25)); });
      ASSERT_EQ(step(map, ids), reference.step(ids));
      ASSERT_EQ(map.takeReplaced(), std::exchange(reference.replaced, {}));
      for (const auto& [id, row] : reference.row_of) {
        ASSERT_EQ(table.ids[row], id);
        ASSERT_EQ(table.uses[row], reference.used.at(id) + 1);
      }
    }
  }
}

TEST(IdMap, KeepsRowsOfTheStep) {
  Table table(3);
  IdMap map(shapeOf(3), table.at(0));
  EXPECT_THAT(step(map, {7, 8, 9}), ElementsAre(0, 1, 2)); // 2: the shared row
  EXPECT_EQ(map.turnedAway(), 1);
  EXPECT_THAT(map.takeReplaced(), IsEmpty());
  EXPECT_THAT(step(map, {8, 9}), ElementsAre(1, 0));
  EXPECT_THAT(map.takeReplaced(), ElementsAre(0));
  EXPECT_EQ(map.used(), 2);
}

TEST(IdMap, AdmitsAfterSoManySights) {
  Table table(4);
  IdMap map(shapeOf(4, 1, 3), table.at(0));
  EXPECT_THAT(step(map, {7, 7, 8}), ElementsAre(3, 3, 3));
  EXPECT_THAT(step(map, {8, 7}), ElementsAre(3, 0)); // the third 7, in one or several steps
  EXPECT_THAT(step(map, {9, 9, 9}), ElementsAre(1, 1, 1)); // all of the step that admits
  EXPECT_THAT(step(map, {8}), ElementsAre(2));
}

TEST(IdMap, AnAdmittedIdThatIsTurnedAwayKeepsItsCount) {
  Table table(3);
  IdMap map(shapeOf(3, 1, 2), table.at(0));
  EXPECT_THAT(step(map, {7, 7, 8, 8, 9, 9}), ElementsAre(0, 0, 1, 1, 2, 2)); // 2: the shared row
  EXPECT_EQ(map.turnedAway(), 1);
  EXPECT_THAT(step(map, {9}), ElementsAre(0));
  EXPECT_THAT(map.takeReplaced(), ElementsAre(0));
  EXPECT_THAT(table.candidates(0, 3), IsEmpty());
}

TEST(IdMap, FindChangesNothing) {
  Table table(4);
  IdMap map(shapeOf(4), table.at(0));
  step(map, {7});
  const Table before = table;
  const std::vector<int64_t> ids{7, 8};
  std::vector<int64_t> rows(2);
  map.find(ids.data(), 2, rows.data());
  EXPECT_THAT(rows, ElementsAre(0, 3));
  EXPECT_EQ(table.ids, before.ids);
  EXPECT_EQ(table.uses, before.uses);
}

// One map of 4 buckets, and 4, 2 or 1 with equal parts of them over the same arrays, give the same rows and have the same state.
TEST(IdMap, BucketsCanBeDividedAmongMaps) {
  constexpr int64_t kRows = 40;
  for (const int64_t admit_after : {1, 2}) {
    Table whole_table(kRows);
    Table parts_table(kRows);
    IdMap whole(shapeOf(kRows, 4, admit_after), whole_table.at(0));
    std::vector<std::unique_ptr<IdMap>> parts;
    const auto divide = [&](int32_t count) {
      parts.clear();
      for (int32_t part = 0; part < count; ++part) {
        IdMap::Shape shape = shapeOf(kRows / count, 4 / count, admit_after);
        shape.first_bucket = part * 4 / count;
        shape.all_buckets = 4;
        parts.push_back(std::make_unique<IdMap>(shape, parts_table.at(part * kRows / count)));
      }
    };
    divide(2);
    std::mt19937 random(3);
    for (int number = 0; number < 100; ++number) {
      if (number % 10 == 9) {
        divide(4 >> number / 10 % 3); // as after loading a checkpoint
      }
      std::vector<int64_t> ids(20);
      std::generate(ids.begin(), ids.end(), [&] { return static_cast<int64_t>(mixId(random() % 100)); });
      const std::vector<int64_t> expected = step(whole, ids);
      const auto count = static_cast<int64_t>(parts.size());
      for (int64_t part = 0; part < count; ++part) {
        std::vector<int64_t> own, rows;
        for (size_t at = 0; at < ids.size(); ++at) {
          if ((ids[at] >> 61) * count / 4 == part) {
            own.push_back(ids[at]);
            rows.push_back(expected[at] - part * kRows / count);
          }
        }
        ASSERT_EQ(step(*parts[part], own), rows);
      }
      ASSERT_EQ(whole_table.ids, parts_table.ids);
      ASSERT_EQ(whole_table.uses, parts_table.uses);
      for (int64_t row = 0; row < kRows; row += kRows / 4) {
        ASSERT_EQ(whole_table.candidates(row, kRows / 4), parts_table.candidates(row, kRows / 4));
      }
    }
  }
}

TEST(IdMap, RefusesWhatMakesNoSense) {
  Table table(64);
  const auto why = [&](const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& error) {
      EXPECT_EQ(error.record().code, ErrorCode::InvalidArgument);
      return error.record().summary;
    }
    return std::string("nothing");
  };
  const auto making = [&](const IdMap::Shape& shape) { return why([&] { const IdMap map(shape, table.at(0)); }); };
  EXPECT_THAT(making(shapeOf(64, 3)), HasSubstr("1, 2, 4"));
  EXPECT_THAT(making(shapeOf(5, 4)), HasSubstr("5 rows cannot be divided into 4"));
  EXPECT_THAT(making(shapeOf(4, 4)), HasSubstr("2 rows or more"));
  EXPECT_THAT(making(shapeOf(4, 1, 0)), HasSubstr("seen once at least"));
  IdMap::Shape beyond = shapeOf(32, 2);
  beyond.first_bucket = 1;
  EXPECT_THAT(making(beyond), HasSubstr("not among all buckets"));

  IdMap::Shape half = shapeOf(32, 1);
  half.all_buckets = 2;
  IdMap map(half, table.at(0));
  const std::vector<int64_t> ids{1, int64_t{1} << 62};
  EXPECT_THAT(why([&] { map.learn(ids.data(), 2); }), HasSubstr("bucket 1, which another rank has"));
  EXPECT_EQ(map.used(), 0);
  const int64_t negative = -5;
  EXPECT_THAT(why([&] { map.learn(&negative, 1); }), HasSubstr("Mixed id -5"));
  table.ids[3] = int64_t{1} << 62;
  EXPECT_THAT(making(half), HasSubstr("row 3 has an id of another bucket"));
}

} // namespace
} // namespace pycomm
