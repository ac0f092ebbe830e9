#include "elastic/step_ledger.h"

#include <gtest/gtest.h>

#include <optional>

namespace pycomm::elastic {
namespace {

using Committed = StepLedger::Committed;
using Outcome = StepLedger::Outcome;

constexpr Wish kNothing{};
constexpr Wish kLeaves{.leaves = true, .admits = false};
constexpr Wish kAdmits{.leaves = false, .admits = true};

View viewOf(uint64_t epoch, int64_t step) {
  View view;
  view.epoch = epoch;
  view.step = step;
  return view;
}

/// One whole round of epoch 0.
Committed make(StepLedger& ledger, Round round, const Wish& all) {
  ledger.launch(round);
  EXPECT_TRUE(ledger.finish(0));
  return ledger.commit(0, all);
}

TEST(StepLedger, AStepIsCommittedOnceItHasFinishedAndTheRoundHasEnded) {
  StepLedger ledger;
  EXPECT_FALSE(ledger.finish(0)); // nothing was launched
  EXPECT_FALSE(ledger.mayCommit());
  ledger.launch();
  EXPECT_EQ(ledger.commit(0, kNothing), Committed::TooLate);
  EXPECT_TRUE(ledger.finish(0));
  EXPECT_TRUE(ledger.mayCommit());
  EXPECT_EQ(ledger.state(), (StepState{0, true, true}));
  EXPECT_EQ(ledger.commit(0, kNothing), Committed::GoesOn);
  EXPECT_EQ(ledger.state(), (StepState{1, false, false}));
  EXPECT_EQ(ledger.commit(0, kNothing), Committed::TooLate); // not twice
}

TEST(StepLedger, NothingCountsAfterTheSeal) {
  StepLedger ledger;
  ledger.launch();
  EXPECT_EQ(ledger.seal(), (StepState{0, true, false}));
  EXPECT_FALSE(ledger.finish(0));
  EXPECT_EQ(ledger.state(), (StepState{0, true, false}));
  StepLedger finished;
  finished.launch();
  EXPECT_TRUE(finished.finish(0));
  EXPECT_EQ(finished.seal(), (StepState{0, true, true}));
  EXPECT_EQ(finished.commit(0, kNothing), Committed::TooLate);
}

TEST(StepLedger, TheNextViewCommitsOrSumsAgain) {
  StepLedger finished;
  finished.launch();
  EXPECT_TRUE(finished.finish(0));
  (void)finished.seal();
  EXPECT_EQ(finished.install(viewOf(1, 1)), Outcome::Commit);
  EXPECT_EQ(finished.state(), (StepState{1, false, false}));

  StepLedger again;
  again.launch();
  EXPECT_TRUE(again.finish(0));
  (void)again.seal();
  EXPECT_EQ(again.install(viewOf(1, 0)), Outcome::Redo);
  EXPECT_FALSE(again.mayCommit()); // it had finished in the old epoch
  EXPECT_FALSE(again.finish(0)); // of that, before and after it is launched again
  again.launch();
  EXPECT_FALSE(again.finish(0));
  EXPECT_EQ(again.commit(0, kNothing), Committed::TooLate);
  EXPECT_TRUE(again.finish(1));
  EXPECT_EQ(again.commit(1, kNothing), Committed::GoesOn);

  StepLedger idle(7);
  EXPECT_EQ(idle.install(viewOf(3, 7)), Outcome::Nothing);
}

// ---- leaving

TEST(StepLedger, ARankLeavesWithAStepAndNotBetweenSteps) {
  StepLedger ledger;
  ledger.leave();
  for (const Round round : {Round::BetweenSteps, Round::Admission}) {
    ledger.launch(round);
    EXPECT_FALSE(ledger.finish(0).value().leaves);
    EXPECT_FALSE(ledger.leaves());
    EXPECT_EQ(ledger.commit(0, kNothing), Committed::GoesOn);
  }
  ledger.launch();
  EXPECT_TRUE(ledger.finish(0).value().leaves);
  EXPECT_TRUE(ledger.leaves());
  EXPECT_FALSE(ledger.hasLeft());
  EXPECT_EQ(ledger.commit(0, kLeaves), Committed::Leaves);
  EXPECT_TRUE(ledger.hasLeft());
}

TEST(StepLedger, WhoLeavesStaysForAStepThatIsSummedAgain) {
  StepLedger ledger;
  ledger.leave();
  ledger.launch();
  EXPECT_TRUE(ledger.finish(0));
  EXPECT_EQ(ledger.install(viewOf(1, 0)), Outcome::Redo);
  EXPECT_TRUE(ledger.leaves());
  EXPECT_FALSE(ledger.hasLeft());
  ledger.leave(); // changes nothing
  ledger.launch();
  EXPECT_TRUE(ledger.finish(1).value().leaves);
}

TEST(StepLedger, TheStepWithWhichARankLeavesCounts) {
  StepLedger ledger;
  ledger.leave();
  ledger.launch();
  EXPECT_TRUE(ledger.finish(0));
  ledger.left(viewOf(1, 1));
  EXPECT_TRUE(ledger.hasLeft());
  EXPECT_EQ(ledger.state(), (StepState{1, false, false}));
}

// ---- joining

TEST(StepLedger, AnAdmissionIsDueOnceAllMembersAdmit) {
  StepLedger ledger;
  ledger.setAdmits(true);
  ledger.launch();
  EXPECT_TRUE(ledger.finish(0).value().admits);
  EXPECT_EQ(ledger.commit(0, kNothing), Committed::GoesOn); // another one does not
  EXPECT_FALSE(ledger.admissionIsDue());
  EXPECT_EQ(make(ledger, Round::Step, kAdmits), Committed::GoesOn);
  EXPECT_TRUE(ledger.admissionIsDue());
}

TEST(StepLedger, MembersStopForNewcomersBehindAnAdmissionOnly) {
  StepLedger ledger;
  EXPECT_EQ(make(ledger, Round::Step, kAdmits), Committed::GoesOn);
  EXPECT_EQ(make(ledger, Round::BetweenSteps, kAdmits), Committed::GoesOn);
  EXPECT_TRUE(ledger.admissionIsDue()); // still
  EXPECT_EQ(make(ledger, Round::Admission, kAdmits), Committed::Admits);
  EXPECT_FALSE(ledger.admissionIsDue());
}

TEST(StepLedger, AnAdmissionThatNotAllWantAnyMoreStopsNobody) {
  StepLedger ledger;
  EXPECT_EQ(make(ledger, Round::Step, kAdmits), Committed::GoesOn);
  EXPECT_EQ(make(ledger, Round::Admission, kNothing), Committed::GoesOn); // the newcomer has died
  EXPECT_FALSE(ledger.admissionIsDue());
}

TEST(StepLedger, AnAdmissionWhoseEpochEndsIsNotMadeAgain) {
  for (const bool finished : {false, true}) {
    StepLedger ledger;
    (void)make(ledger, Round::Step, kAdmits);
    ledger.launch(Round::Admission);
    EXPECT_EQ(finished && ledger.finish(0), finished);
    EXPECT_EQ(ledger.state(), (StepState{1, false, finished})); // nothing that members would wait for
    EXPECT_EQ(ledger.install(viewOf(1, 1)), Outcome::Nothing);
    EXPECT_EQ(ledger.state(), (StepState{1, false, false}));
    EXPECT_FALSE(ledger.finish(1));
  }
}

TEST(StepLedger, AnAdmissionThatAllHaveFinishedCounts) {
  StepLedger ledger;
  (void)make(ledger, Round::Step, kAdmits);
  ledger.launch(Round::Admission);
  EXPECT_TRUE(ledger.finish(0));
  EXPECT_EQ(ledger.install(viewOf(1, 2)), Outcome::Commit);
}

TEST(StepLedger, NoAdmissionIsDueInTheNextEpoch) {
  StepLedger ledger;
  EXPECT_EQ(make(ledger, Round::Step, kAdmits), Committed::GoesOn);
  EXPECT_EQ(ledger.install(viewOf(1, 1)), Outcome::Nothing);
  EXPECT_FALSE(ledger.admissionIsDue()); // a member that committed the step by this view does not know of it
}

TEST(StepLedger, ANewcomerThatIsAskedToLeaveBeforeItHoldsTheStateLeavesWithItsFirstStep) {
  StepLedger ledger;
  ledger.leave();
  ledger.load(7);
  EXPECT_EQ(ledger.install(viewOf(3, 7)), Outcome::Nothing);
  ledger.launch();
  EXPECT_TRUE(ledger.finish(3).value().leaves);
}

} // namespace
} // namespace pycomm::elastic
