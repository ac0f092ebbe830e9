#include "idmap/lru_slots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <list>
#include <random>
#include <vector>

#include "base/error.h"

namespace pycomm {
namespace {

using ::testing::HasSubstr;

struct Slots {
  explicit Slots(int32_t size) : ids(size, LruSlots::kFree), uses(size), slots(ids.data(), uses.data(), size) {}
  std::vector<int64_t> ids, uses;
  LruSlots slots;
};

TEST(LruSlots, AgreeWithAList) {
  std::mt19937 random(1);
  for (int program = 0; program < 50; ++program) {
    const int32_t size = 1 + static_cast<int32_t>(random() % 9);
    Slots tested(size);
    std::list<int64_t> expected; // oldest first
    for (int event = 0; event < 300; ++event) {
      const int64_t id = random() % 15;
      const int32_t slot = tested.slots.find(id);
      const auto at = std::find(expected.begin(), expected.end(), id);
      ASSERT_EQ(slot != LruSlots::kNone, at != expected.end());
      if (slot == LruSlots::kNone) {
        const bool full = expected.size() == static_cast<size_t>(size);
        ASSERT_EQ(tested.slots.insert(id) == LruSlots::kNone, full);
        if (!full) {
          expected.push_back(id);
        }
      } else if (random() % 3 == 0) {
        tested.slots.erase(slot);
        expected.erase(at);
      } else {
        tested.slots.use(slot);
        expected.splice(expected.end(), expected, at);
      }
      ASSERT_EQ(tested.slots.used(), static_cast<int32_t>(expected.size()));
      const int32_t oldest = tested.slots.oldest();
      ASSERT_EQ(oldest == LruSlots::kNone ? -1 : tested.ids[oldest], expected.empty() ? -1 : expected.front());
    }
    // What the arrays hold is all: a second one goes on as the first would.
    LruSlots loaded(tested.ids.data(), tested.uses.data(), size);
    for (; !expected.empty(); expected.pop_front()) {
      ASSERT_EQ(tested.ids[loaded.oldest()], expected.front());
      loaded.erase(loaded.oldest());
    }
    ASSERT_EQ(loaded.oldest(), LruSlots::kNone);
  }
}

TEST(LruSlots, GiveTheLowestFreeSlotFirst) {
  Slots tested(3);
  EXPECT_EQ(tested.slots.insert(30), 0);
  EXPECT_EQ(tested.slots.insert(20), 1);
  EXPECT_EQ(tested.slots.insert(10), 2);
  EXPECT_EQ(tested.slots.insert(40), LruSlots::kNone);
}

TEST(LruSlots, RefuseAStateThatCannotBe) {
  const auto why = [](std::vector<int64_t> ids) {
    std::vector<int64_t> uses(ids.size());
    try {
      const LruSlots slots(ids.data(), uses.data(), static_cast<int32_t>(ids.size()));
    } catch (const Error& error) {
      return error.record().summary;
    }
    return std::string("nothing");
  };
  EXPECT_THAT(why({5, 6, 5}), HasSubstr("id 5 has two slots"));
  EXPECT_THAT(why({5, -2}), HasSubstr("slot 1 has id -2"));
  EXPECT_EQ(why({5, -1}), "nothing");
}

} // namespace
} // namespace pycomm
