#include "engine/operation/issue_context.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "schedule/step.h"

namespace pycomm {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::shared_ptr<IssueContext> strand(uint64_t name) {
  return std::make_shared<IssueContext>(StrandName{name, 0, 0}, CallbackOrigin());
}

TEST(OperationIds, AreEqualOnAllRanksHoweverThreadsInterleave) {
  std::atomic<int64_t> counter_a{0};
  std::atomic<int64_t> counter_b{0};
  const OperationId user_a = takeOperationId(counter_a, 1);
  const OperationId user_b = takeOperationId(counter_b, 1);
  EXPECT_EQ(user_a.id, user_b.id);

  // Rank a: the callback issues between the user's two operations; rank b: after both.
  uint64_t callback_a = 0;
  uint64_t callback_b = 0;
  {
    const IssueScope scope(strand(7));
    callback_a = takeOperationId(counter_a, 1).id;
  }
  const uint64_t second_a = takeOperationId(counter_a, 1).id;
  const uint64_t second_b = takeOperationId(counter_b, 1).id;
  {
    const IssueScope scope(strand(7));
    callback_b = takeOperationId(counter_b, 1).id;
    EXPECT_NE(takeOperationId(counter_b, 1).id, callback_b);
  }
  EXPECT_EQ(second_a, second_b);
  EXPECT_EQ(callback_a, callback_b);
  EXPECT_NE(callback_a & kDerivedIdBit, 0U);
}

// "Leaders sum, then all broadcast": only some ranks issue in the first group.
TEST(OperationIds, AreCountedForEachGroupByItself) {
  std::atomic<int64_t> counter{0};
  const IssueScope leader(strand(7));
  static_cast<void>(takeOperationId(counter, 1));
  const uint64_t of_leader = takeOperationId(counter, 2).id;
  const IssueScope other(strand(7));
  EXPECT_EQ(takeOperationId(counter, 2).id, of_leader);
  EXPECT_EQ(counter.load(), 0);
}

TEST(OperationIds, AnAmbiguousStrandHasNone) {
  std::atomic<int64_t> counter{0};
  const IssueScope scope(std::make_shared<IssueContext>(StrandName{7, 0, 0}, CallbackOrigin(), StrandTraits(), true));
  try {
    static_cast<void>(takeOperationId(counter, 1));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.record().code, ErrorCode::InvalidArgument);
    EXPECT_THAT(error.record().summary, HasSubstr("two threads of this process"));
  }
}

// The strand that completes the future of a callback × whether the callback is its first × whether this thread added it.
TEST(PromisedCallbacks, IssueAsTheirThreadOrAsTheStrandThatCompletesOrNotAtAll) {
  enum class By { ThisThread, OtherThread, Strand, StrandAgain, Nobody };
  for (const By by : {By::ThisThread, By::OtherThread, By::Strand, By::StrandAgain, By::Nobody}) {
    for (const bool first : {true, false}) {
      for (const bool added_here : {true, false}) {
        auto completion = std::make_shared<Completion>();
        if (by == By::ThisThread) {
          completion->note();
        } else if (by == By::OtherThread) {
          std::thread([&] { completion->note(); }).join();
        } else if (by != By::Nobody) {
          const IssueScope scope(strand(7));
          if (by == By::StrandAgain) {
            Completion().note();
          }
          completion->note();
        }
        completion->note(); // counts no more
        auto promised = std::make_shared<Promised>();
        promised->completions = {completion};
        promised->adder = added_here ? std::this_thread::get_id() : std::thread::id();
        promised->first = first;
        const auto callback = std::make_shared<IssueContext>(
            StrandName{5, 0, 0}, CallbackOrigin(), StrandTraits(), false, std::move(promised));
        const auto begun = IssueContext::beginning(callback);
        const std::string row =
            std::to_string(static_cast<int>(by)) + (first ? " first" : "") + (added_here ? " here" : "");
        const bool here = by == By::ThisThread || by == By::Nobody; // Nobody: the last note() above is the first
        EXPECT_EQ(begun == nullptr, here && added_here) << row;
        if (begun != nullptr) {
          EXPECT_EQ(begun->ambiguous(), by != By::Strand || !first) << row;
        }
        if (by == By::Strand) {
          const auto again = std::make_shared<IssueContext>(
              StrandName{6, 0, 0}, CallbackOrigin(), StrandTraits(), false, callback->promised());
          EXPECT_NE(IssueContext::beginning(again)->name().anywhere, begun->name().anywhere) << row;
          EXPECT_NE(begun->name().anywhere, 5U) << row;
        }
      }
    }
  }
  auto promised = std::make_shared<Promised>();
  promised->completions = {std::make_shared<Completion>()};
  promised->adder = std::this_thread::get_id();
  const auto callback =
      std::make_shared<IssueContext>(StrandName{5, 0, 0}, CallbackOrigin(), StrandTraits(), false, std::move(promised));
  EXPECT_TRUE(IssueContext::beginning(callback)->ambiguous()) << "a part of a collection, not complete";
}

TEST(StrandNames, AreTheOperationsOwnAtHomeAndByRoleElsewhere) {
  const StrandName mine{1, 2, 3};
  const StrandName theirs{9, 2, 3}; // another role on another rank
  EXPECT_EQ(mine.then(4).in(3), theirs.then(4).in(3));
  EXPECT_NE(mine.then(4).in(5), theirs.then(4).in(5));
  EXPECT_NE(mine.then(4).in(3), mine.then(5).in(3));
  EXPECT_EQ(mine.by(mine).in(3), theirs.by(theirs).in(3));
}

// What a hook issues has no number of its own: its call is the name, also of what callbacks of that issue.
TEST(CallbackOrigins, OfAHookNameItsCall) {
  CallbackOrigin chain;
  chain.of = CallbackOrigin::Of::Chain;
  chain.hook = 2;
  chain.sequence = 7;
  chain.group = 3;
  EXPECT_EQ(CallbackOrigin::unpacked(chain.packed()).text(), "issued in call 7 of comm hook 2 in group 3");
  const OperationId id{kDerivedIdBit | 9, -1, chain.packed()};
  const auto kind = static_cast<uint8_t>(Collective::AllReduce);
  CallbackOrigin callback = CallbackOrigin::ofOperation(id, kind);
  callback.number = 1;
  EXPECT_EQ(
      CallbackOrigin::unpacked(callback.packed()).text(),
      "issued in callback 1 of all_reduce of call 7 of comm hook 2 in group 3");
  for (const auto& [of, text] : std::map<CallbackOrigin::Of, std::string>{
           {CallbackOrigin::Of::Message, "a message of call 7 of comm hook 2 in group 3"},
           {CallbackOrigin::Of::Promise, "futures made in call 7 of comm hook 2 in group 3"},
           {CallbackOrigin::Of::Several,
            "futures collected from all_reduce of call 7 of comm hook 2 in group 3 and others"}}) {
    callback.of = of;
    EXPECT_EQ(CallbackOrigin::unpacked(callback.packed()).text(), "issued in callback 1 of " + text);
  }
  chain.hook = 1000;
  EXPECT_EQ(CallbackOrigin::unpacked(chain.packed()).text(), "issued in call 7 of comm hook 63 or later in group 3");
}

TEST(CallbackOrigins, OfAPartNameTheOperation) {
  const auto context = continuationOf({5, 5, 0}, 1, static_cast<uint8_t>(Collective::AllReduce));
  EXPECT_EQ(context->origin().text(), "issued as a part of all_reduce #5");
}

TEST(CallbackOrigins, TravelInSixtyThreeBits) {
  CallbackOrigin origin;
  origin.of = CallbackOrigin::Of::Operation;
  origin.number = 2;
  origin.kind = static_cast<uint8_t>(Collective::AllReduce);
  origin.sequence = 123'456'789;
  origin.group = 4;
  EXPECT_EQ(origin.packed() & 1, 0U);
  EXPECT_EQ(
      CallbackOrigin::unpacked(origin.packed()).text(), "issued in callback 2 of all_reduce #123456789 in group 4");
  origin.sequence = 0;
  origin.depth = 1;
  EXPECT_EQ(
      CallbackOrigin::unpacked(origin.packed()).text(),
      "issued in callback 2 of the result, 1 deep, of a callback of a callback's all_reduce in group 4");
  origin.number = 1'000'000; // the most that fits must not name one
  EXPECT_THAT(CallbackOrigin::unpacked(origin.packed()).text(), StartsWith("issued in callback 255 or later of "));
  origin.number = 0;
  EXPECT_THAT(CallbackOrigin::unpacked(origin.packed()).text(), StartsWith("issued in a callback of the result"));
  EXPECT_EQ(CallbackOrigin::unpacked(0).text(), "issued in a callback");
  std::set<std::string> texts;
  for (uint64_t bits = 0; bits < 1 << 8; ++bits) { // another build's
    texts.insert(CallbackOrigin::unpacked(bits).text());
  }
  EXPECT_GT(texts.size(), 10U);
}

} // namespace
} // namespace pycomm
