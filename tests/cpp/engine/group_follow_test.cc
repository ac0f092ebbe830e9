// Operations that another library runs (Group::follow).
#include <gtest/gtest.h>

#include "ranks.h"

namespace pycomm::testing {
namespace {

std::optional<ErrorRecord> errorAtEnd(Group& group, const Operation& operation) {
  EXPECT_TRUE(group.wait(operation, Deadline::after(20000)));
  return operation.error();
}

TEST(Follow, TheyAreNumberedWithTheOthersAndEndWhenTheyAreSaidTo) {
  runRanks(2, [](Rank& self) {
    std::vector<float> values(10, 1);
    const auto first = self.group.follow(allReduceCall(values));
    const auto second = self.group.start(allReduceCall(values));
    EXPECT_EQ(first->request().id.sequence + 1, second->request().id.sequence);
    EXPECT_FALSE(errorAtEnd(self.group, *second));
    EXPECT_FALSE(first->done());
    self.group.followedEnded(first, std::nullopt);
    EXPECT_FALSE(errorAtEnd(self.group, *first));
    EXPECT_EQ(values, std::vector<float>(10, 2));
  });
}

TEST(Follow, ItsErrorIsTheOperations) {
  runRanks(1, [](Rank& self) {
    std::vector<float> values(10, 1);
    const auto operation = self.group.follow(allReduceCall(values));
    ErrorRecord record;
    record.code = ErrorCode::Unsupported;
    record.summary = "No.";
    self.group.followedEnded(operation, record);
    self.group.followedEnded(operation, std::nullopt); // too late
    const auto error = errorAtEnd(self.group, *operation);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::Unsupported);
    EXPECT_FALSE(self.group.failure());
  });
}

TEST(Follow, OneThatAnotherRankRunsItselfIsAMismatch) {
  for (const Transport transport : {Transport::Tcp, Transport::SharedMemory}) {
    runRanks(
        2,
        [](Rank& self) {
          std::vector<float> values(10, 1);
          const auto operation =
              self.rank == 0 ? self.group.follow(allReduceCall(values)) : self.group.start(allReduceCall(values));
          const auto error = errorAtEnd(self.group, *operation);
          ASSERT_TRUE(error);
          EXPECT_EQ(error->code, ErrorCode::CollectiveMismatch) << error->text();
          EXPECT_NE(error->summary.find("nccl"), std::string::npos) << error->text();
        },
        [&](Group::Config& config) { config.transport = transport; });
  }
}

TEST(Follow, WhoHasNotEnteredItIsNamedAtTheDeadline) {
  SharedStore marks;
  runRanks(2, [&](Rank& self) {
    std::vector<float> values(10, 1);
    if (self.rank == 1) {
      static_cast<void>(marks.get("told", Deadline::after(20000)));
      return;
    }
    const auto operation = self.group.follow(allReduceCall(values, Deadline::after(3000)));
    const auto error = errorAtEnd(self.group, *operation);
    marks.set("told", "");
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::Timeout);
    EXPECT_EQ(error->peer, 1);
    EXPECT_NE(error->summary.find("has not entered it"), std::string::npos) << error->text();
  });
}

TEST(Follow, ClosingEndsIt) {
  runRanks(1, [](Rank& self) {
    std::vector<float> values(10, 1);
    const auto operation = self.group.follow(allReduceCall(values));
    self.group.close();
    const auto error = errorAtEnd(self.group, *operation);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::ShutDown);
  });
}

} // namespace
} // namespace pycomm::testing
