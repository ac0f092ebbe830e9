#include "engine/report/group_failure.h"

#include <gtest/gtest.h>

namespace pycomm {
namespace {

ErrorRecord record(ErrorCode code, const std::string& summary, int64_t elapsed_ms = 0) {
  ErrorRecord record;
  record.code = code;
  record.summary = summary;
  record.elapsed_ms = elapsed_ms;
  return record;
}

class Failed : public ::testing::Test {
 protected:
  Failed() {
    identity_.rank = 1;
    identity_.size = 2;
    identity_.name = "test";
    identity_.hosts = {"alpha", "beta"};
  }
  GroupIdentity identity_;
  GroupFailure failure_{identity_};
};

TEST_F(Failed, ThereIsNoneWhileAllIsWell) {
  EXPECT_FALSE(failure_.happened());
  EXPECT_FALSE(failure_.record().has_value());
  // A plane says what its operation will end with before the failure is known to all; that alone is none.
  failure_.setOldest(record(ErrorCode::Timeout, "first"), TimePoint());
  EXPECT_FALSE(failure_.record().has_value());
}

TEST_F(Failed, TheFirstCauseStaysAndNamesThisRank) {
  failure_.set(record(ErrorCode::PeerDead, "first"));
  failure_.set(record(ErrorCode::Timeout, "second"));
  ASSERT_TRUE(failure_.happened());
  EXPECT_TRUE(failure_.token().aborted());
  EXPECT_EQ(failure_.record()->code, ErrorCode::PeerDead);
  EXPECT_EQ(failure_.record()->summary, "first");
  EXPECT_EQ(failure_.record()->rank, 1);
  EXPECT_EQ(failure_.record()->host, "beta");
  EXPECT_EQ(failure_.record()->group, "test");
}

TEST_F(Failed, OfTwoPlanesTheOlderOperationCounts) {
  failure_.set(record(ErrorCode::PeerDead, "cause"));
  const TimePoint began = Clock::now();
  const auto ends = [&](int issued_ms, int ended_ms) {
    const TimePoint issued = began + std::chrono::milliseconds(issued_ms);
    failure_.setOldest(record(ErrorCode::PeerDead, std::to_string(issued_ms), ended_ms - issued_ms), issued);
  };
  ends(30, 50);
  ends(20, 50);
  ends(25, 75); // its plane ended later, so it has waited longer
  EXPECT_EQ(failure_.record()->summary, "20");
}

} // namespace
} // namespace pycomm
