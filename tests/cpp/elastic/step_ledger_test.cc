#include "elastic/step_ledger.h"

#include <gtest/gtest.h>

namespace pycomm::elastic {
namespace {

View viewOf(uint64_t epoch, int64_t step) {
  View view;
  view.epoch = epoch;
  view.step = step;
  return view;
}

TEST(StepLedger, AStepIsCommittedOnceAllBucketsHaveFinishedAndTheRoundHasEnded) {
  StepLedger ledger;
  EXPECT_FALSE(ledger.mayCommit());
  ledger.launch(2);
  ledger.finish(0, 1);
  ledger.finish(0, 1); // once
  EXPECT_FALSE(ledger.mayCommit());
  EXPECT_FALSE(ledger.commit(0));
  ledger.finish(0, 0);
  EXPECT_TRUE(ledger.mayCommit());
  EXPECT_EQ(ledger.state(), (StepState{0, true, true}));
  EXPECT_TRUE(ledger.commit(0));
  EXPECT_EQ(ledger.state(), (StepState{1, false, false}));
  EXPECT_FALSE(ledger.commit(0)); // not twice
}

TEST(StepLedger, NothingCountsAfterTheSeal) {
  StepLedger ledger;
  ledger.launch(1);
  EXPECT_EQ(ledger.seal(), (StepState{0, true, false}));
  ledger.finish(0, 0);
  EXPECT_EQ(ledger.state(), (StepState{0, true, false}));
  StepLedger finished;
  finished.launch(1);
  finished.finish(0, 0);
  EXPECT_EQ(finished.seal(), (StepState{0, true, true}));
  EXPECT_FALSE(finished.commit(0));
}

TEST(StepLedger, TheNextViewCommitsOrSumsAgain) {
  StepLedger finished;
  finished.launch(1);
  finished.finish(0, 0);
  (void)finished.seal();
  EXPECT_EQ(finished.install(viewOf(1, 1)), StepLedger::Outcome::Commit);
  EXPECT_EQ(finished.state(), (StepState{1, false, false}));

  StepLedger again;
  again.launch(2);
  again.finish(0, 0);
  (void)again.seal();
  EXPECT_EQ(again.install(viewOf(1, 0)), StepLedger::Outcome::Redo);
  again.finish(0, 1); // of the old epoch, before and after the buckets are launched again
  again.launch(2);
  again.finish(0, 1);
  again.finish(1, 0);
  EXPECT_FALSE(again.mayCommit());
  EXPECT_FALSE(again.commit(0));
  again.finish(1, 1);
  EXPECT_TRUE(again.commit(1));

  StepLedger idle(7);
  EXPECT_EQ(idle.install(viewOf(3, 7)), StepLedger::Outcome::Nothing);
}

TEST(StepLedger, BucketsThatDoNotExistAreIgnored) {
  StepLedger ledger;
  ledger.finish(0, 0);
  ledger.launch(1);
  ledger.finish(0, -1);
  ledger.finish(0, 1);
  EXPECT_FALSE(ledger.mayCommit());
  ledger.launch(0); // a step without buckets has finished
  EXPECT_TRUE(ledger.mayCommit());
}

} // namespace
} // namespace pycomm::elastic
