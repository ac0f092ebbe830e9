"""Break a rule by which processes join, one at a time; a named test must fail.

driver_mutations.py has those of deaths. See mutated_tests.py for what is expected of each.

    python tests/cpp/proof/programs/joining_mutations.py --check
    python tests/cpp/proof/programs/joining_mutations.py [--work FOLDER] [--only NAME …]
"""

from __future__ import annotations

import sys

import mutated_tests
from mutated_tests import Mutation

_AGREEMENT = "agreement.cc"
_JOIN = "agreement_driver_join.cc"


def _rule(name: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, file, old, new, ":".join(tests), "engine")


def _of_agreement(name: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, file, old, new, ":".join(tests), "elastic")


MUTATIONS = [
    _of_agreement(
        "a newcomer has kept nothing before it is a member",
        _AGREEMENT,
        "  keep(); // it may become a voter, and end before it knows\n",
        "",
        "Agreement.ANewcomerHasKeptARecordBeforeItSaysAnything",
    ),
    _of_agreement(
        "the end of a newcomer is forgotten when it becomes a member",
        _AGREEMENT,
        "  if (!view_.has(peer) && phase_ != Phase::Agreeing) {",
        "  if (!view_.has(peer)) {",
        "Agreement.ANewcomerThatEndsWhileItIsAdmittedDoesNotCount",
    ),
    _of_agreement(
        "a newcomer forgets whose end it knows",
        _AGREEMENT,
        "  if (phase_ == Phase::Joining && peer != config_.self) {\n    gone_",
        "  if (false) {\n    gone_",
        "Agreement.ANewcomerThatKnowsOfTheEndOfAMemberBeginsWithThat",
    ),
    _of_agreement(
        "members wait for newcomers that they have reached during the pause",
        "agreement.h",
        "(phase_ == Phase::Pausing ? newcomer.awaited : mayAdmit(newcomer))",
        "mayAdmit(newcomer)",
        "Agreement.ANewcomerThatIsReachedDuringAPauseIsNotWaitedForAndIsTheNextOne",
    ),
    _of_agreement(
        "too few members wait for all newcomers, although those that have loaded suffice",
        _AGREEMENT,
        "  if (loaded >= enough) {\n",
        "  if (!waits && loaded >= enough) {\n",
        "Agreement.TooFewMembersGoOnWithTheNewcomersThatHaveLoadedIfTheySuffice",
    ),
    _of_agreement(
        "a newcomer promises before those that join with it have answered",
        _AGREEMENT,
        "asked_at_ + window() / 2",
        "began_ + window()",
        "Agreement.TwoNewcomersAreAdmittedInOneStop",
    ),
    _of_agreement(
        "the state of other members counts",
        _AGREEMENT,
        "message.step.finished && message.view == view_id_ ?",
        "message.step.finished ?",
        "Agreement.TheStateOfOtherMembersAdmitsNobody",
    ),
    _of_agreement(
        "each agreement gives too few members their time anew",
        _AGREEMENT,
        "(has_more || too_few_until_ == TimePoint::max())",
        "(has_more || true)",
        "Agreement.AConnectionThatBreaksGivesTooFewNoMoreTime",
    ),
    _of_agreement(
        "too few members wait for no state that is on its way",
        _AGREEMENT,
        "!awaits_step_ && awaitsState()",
        "false",
        "Agreement.TooFewWaitForAStateThatIsOnItsWayForSoLongAsAPause",
    ),
    _of_agreement(
        "too few members wait for a state that nobody gives",
        _AGREEMENT,
        "!awaits_step_ && awaitsState()",
        "awaitsState()",
        "Agreement.TooFewGiveANewcomerThatGetsNoStateNoMoreTime",
    ),
    _of_agreement(
        "one of too few raises while rank 0 may let a newcomer in",
        _AGREEMENT,
        "  if (self_ != 0) {\n",
        "  if (false) {\n",
        "Agreement.NobodyButRankZeroRaisesWhileItMayStillLetANewcomerIn",
    ),
    _of_agreement(
        "too few members wait for all newcomers beyond their time",
        _AGREEMENT,
        "waits && now < tooFewAt() ?",
        "waits ?",
        "Agreement.TooFewLetInWhoHasLoadedWhenTheirTimeIsOut",
    ),
    _of_agreement(
        "too few members raise before they let in who has loaded",
        _AGREEMENT,
        "    beginIfChangeIsReady(now);\n    if (phase_ == Phase::Working) {\n",
        "    if (phase_ == Phase::Working) {\n",
        "Agreement.TooFewLetInWhoHasLoadedWhenTheirTimeIsOut",
    ),
    _of_agreement(
        "one of too few does not ask rank 0",
        _AGREEMENT,
        "    send(make(Message::Kind::Ping), {view_.members.front()}); // does it",
        "    // does it",
        "Agreement.AGoodbyeOfRankZeroThatIsLostIsSaidAgain",
    ),
    _of_agreement(
        "a member that has raised does not say so again",
        _AGREEMENT,
        "    send(goodbye(), {message.from}); // the first",
        "    // the first",
        "Agreement.AGoodbyeOfRankZeroThatIsLostIsSaidAgain",
    ),
    _of_agreement(
        "the answer of rank 0 gives one of too few no time",
        _AGREEMENT,
        "      too_few_until_ = std::max(too_few_until_, now); // it",
        "      // it",
        "Agreement.NobodyButRankZeroRaisesWhileItMayStillLetANewcomerIn",
    ),
    _of_agreement(
        "one of too few raises in a new view before it has asked rank 0",
        _AGREEMENT,
        "  } else if (self_ != 0) { // of this view's rank 0 it has heard nothing\n"
        "    too_few_until_ = std::max(too_few_until_, now);\n  }\n"
        "  retry_at_ = tooFew() && self_ != 0 ? too_few_until_ :",
        "  }\n  retry_at_ = tooFew() && self_ != 0 ? std::max(now, too_few_until_) :",
        "Agreement.AFurtherDeathBehindTheTimeOfTooFewCostsNobodyItsPlace",
    ),
    _of_agreement(
        "one of too few raises before the detector finds rank 0 silent",
        _AGREEMENT,
        "milliseconds(config_.dead_after_ms) + window()); // the detector",
        "milliseconds(config_.dead_after_ms)); // the detector",
        "Agreement.TooFewRaiseAlsoIfRankZeroSaysNothing",
    ),
    _of_agreement(
        "any answer gives one of too few time",
        _AGREEMENT,
        "phase_ == Phase::Working && position == 0) {",
        "phase_ == Phase::Working) {",
        "Agreement.TooFewRaiseAlsoIfRankZeroSaysNothing",
    ),
    _of_agreement(
        "each member keeps the newcomers that it has known first",
        _AGREEMENT,
        "  if (newcomers_.size() < kMaxNewcomers) {\n    return true;\n  }\n",
        "  return newcomers_.size() < kMaxNewcomers;\n",
        "Agreement.MembersThatKnowDifferentNewcomersComeToKnowTheSame",
    ),
    _of_agreement(
        "any newcomer takes the place of another one",
        _AGREEMENT,
        " || last->first < newcomer) {\n",
        ") {\n",
        "Agreement.ALargerNewcomerTakesNobodysPlace",
    ),
    _of_agreement(
        "a newcomer takes the place of one for which members wait",
        _AGREEMENT,
        "  if (phase_ != Phase::Working || last ==",
        "  if (last ==",
        "Agreement.ANewcomerForWhichMembersWaitKeepsItsPlace",
    ),
    _of_agreement(
        "a newcomer takes the place of one that has loaded",
        _AGREEMENT,
        "[&](const auto& known) { return !hasLoaded(known.second); });",
        "[&](const auto&) { return true; });",
        "Agreement.ANewcomerThatHasLoadedKeepsItsPlace",
    ),
    _rule(
        "a step that waits for members counts as one that gives newcomers the state",
        "agreement_driver.cc",
        "  awaits_step_ = true;\n",
        "",
        "AgreementDriver.TooFewMembersThatGiveNoStateRaiseWhenTheirTimeIsOut",
    ),
    _rule(
        "a step that was given up waits for members",
        _JOIN,
        "  awaits_step_ = false;\n",
        "",
        "AgreementDriver.TooFewMembersGiveTheirStateAlsoIfTheirProgramComesToThatLater",
    ),
    _rule(
        "a step that has begun waits for members",
        "agreement_driver.cc",
        "  awaits_step_ = false;\n",
        "",
        "AgreementDriver.TooFewMembersGiveTheirStateAlsoIfTheirProgramComesToThatLater",
    ),
    _of_agreement(
        "a newcomer takes the state of one side with it to another",
        _AGREEMENT,
        "message.next->step != loaded_ || message.next->parent != loaded_view_",
        "message.next->step != loaded_",
        "Agreement.ANewcomerThatIsAMemberWithTheStateOfAnotherStepOrOfOthersRaises",
    ),
    _rule(
        "newcomers do not know those that hold the state already",
        _JOIN,
        "{&view.members, &loading, &holding}",
        "{&view.members, &loading}",
        "AgreementDriver.NewcomersThatLoadOneAfterTheOtherAreAdmittedTogether",
    ),
    _rule(
        "a newcomer does not ask those that it has not known before",
        _AGREEMENT,
        "contains(fellows_, message.from) && !reached(message.from)",
        "false",
        "AgreementDriver.NewcomersThatLoadOneAfterTheOtherAreAdmittedTogether",
    ),
    _rule(
        "a refusal of earlier members counts",
        _JOIN,
        "!epoch || *epoch < given_in_",
        "!epoch",
        "AgreementDriver.ARefusalInTheNameOfEarlierMembersCountsForNothing",
    ),
    _rule(
        "a newcomer that missed its admission is not told",
        _JOIN,
        "      exclude(from);\n",
        "",
        "AgreementDriver.ANewcomerThatHasMissedThatItWasAMemberEnds",
    ),
    _rule(
        "a stranger that is forgotten is not told",
        _JOIN,
        "    return false; // forgotten while it was silent\n",
        "    return true;\n",
        "AgreementDriver.AStrangerThatIsForgottenIsTold",
    ),
    _rule(
        "strangers are remembered for ever",
        _JOIN,
        "  forgetStrangers(now);\n}\n\nTimePoint",
        "}\n\nTimePoint",
        "AgreementDriver.AStrangerThatIsForgottenIsTold",
    ),
    _rule(
        "a member that has ended answers those who want to join",
        "agreement_driver.cc",
        "  guarded([&] { admitNobody(); });\n",
        "",
        "AgreementDriver.AnswersNobodyOnceItHasEnded",
    ),
    _rule(
        "a silent member takes the time of those behind it",
        _JOIN,
        "std::clamp(share, kShortestAskMs, kOneStepMs)",
        "std::max(share, kOneStepMs)",
        "AgreementDriver.TheLastOfManyMembersIsAskedIfTheOthersAreSilent",
    ),
    _rule(
        "a newcomer whose state was read too late is not told",
        _JOIN,
        "began < *serving.until) { // a member has died,",
        "true) { // a member has died,",
        "AgreementDriver.ANewcomerLearnsThatItsStateWasReadTooLate",
    ),
    _rule(
        "members with another secret are asked",
        _JOIN,
        "    if (to.key_id != from.self.key_id) {",
        "    if (false) {",
        "AgreementDriver.MembersWithAnotherSecretAreNotAsked",
    ),
    _rule(
        "the thread that makes groups waits for the disk",
        _JOIN,
        "  peers_.write(std::move(text));\n",
        "  peers_.write(std::move(text));\n  (void)peers_.flush(Deadline::after(60'000));\n",
        "AgreementDriver.ASlowDiskHoldsUpNoChangeOfMembers",
    ),
    _rule(
        "a list of members that comes late replaces that of others",
        "peers_file.cc",
        "    if (closed) { // by now",
        "    if (false) { // by now",
        "PeersFile.ReplacesNothingOnceItIsClosed",
    ),
    _rule(
        "a member that has left keeps its port",
        _JOIN,
        "  place_.withdraw(); // another member",
        "  // another member",
        "FixedPort.TheNextMemberTakesItWhenOneHasLeft",
    ),
    _rule(
        "nobody takes a port that was another member's",
        "endpoint.cc",
        "      if (port.acceptor == nullptr) {\n        (void)take(port);\n      }\n",
        "",
        "FixedPort.TheNextMemberTakesItWhenOneHasEnded",
    ),
    _rule(
        "a port that all know lets visitors in",
        "endpoint.cc",
        "  if (!session.found.empty()) { // all else",
        "  if (false) { // all else",
        "FixedPort.AnswersOneQuestion",
    ),
    _rule(
        "rank 0 begins to give the state of an epoch that is over",
        _JOIN,
        "  waiting_.to.clear(); // nothing would end what begins now\n",
        "",
        "AgreementDriver.NobodyBeginsToGiveTheStateOfAnEpochThatIsOver",
    ),
    _rule(
        "members go on before they know whether they are too few",
        _JOIN,
        "return !over_ && view_.members.size() >= config_.min_ranks;",
        "return view_.members.size() >= config_.min_ranks;",
        "AgreementDriver.TooFewMembersGiveTheirStateAlsoIfOneDiesJustBehindAnAdmission",
    ),
    _rule(
        "a newcomer that the state did not reach is not asked again",
        _JOIN,
        "    std::erase_if(tried_, [this](const ProcessId& one) { // one that comes",
        "    if (false) std::erase_if(tried_, [this](const ProcessId& one) { // one that comes",
        "AgreementDriver.ANewcomerThatTheStateDidNotReachGetsItWhenItAsksAgain",
    ),
    _rule(
        "an admission begins in an epoch in which it is not due",
        "agreement_driver.cc",
        "  if (view_.epoch != epoch || !ledger_.admissionIsDue()) {",
        "  if (false) {",
        "AgreementDriver.AnAdmissionThatIsNotDueInTheNextEpochDoesNotBegin",
    ),
    _rule(
        "members that wait for each other wait for newcomers, too",
        "agreement_driver.cc",
        "awaitPresent(lock, deadline, 1) ?",
        "awaitPresent(lock, deadline, config_.min_ranks) ?",
        "AgreementDriver.TooFewMembersGiveTheirStateAlsoIfAnAdmissionWasDue",
    ),
    _rule(
        "too few members raise at once in place of an admission",
        "step_ledger.cc",
        "  state_.launched = round != Round::Admission;\n",
        "  state_.launched = true;\n",
        "AgreementDriver.TooFewMembersGiveTheirStateAlsoIfAnAdmissionWasUnderWay",
    ),
    _rule(
        "waiting for the next members begins a step",
        "agreement_driver.cc",
        "  return awaitPresent(lock, deadline, 1) ? present_ : std::nullopt;\n",
        "  const bool here = awaitPresent(lock, deadline, 1);\n"
        "  here ? launch(elastic::Round::Step) : void();\n"
        "  return here ? present_ : std::nullopt;\n",
        "AgreementDriver.AnAdmissionThatIsNotDueInTheNextEpochDoesNotBegin",
    ),
    _rule(
        "a former member is a newcomer",
        _JOIN,
        "    return !is_late;\n",
        "    return true;\n",
        "AgreementDriver.AFormerMemberIsNoNewcomer",
    ),
    _rule(
        "who came and went is forgotten",
        "agreement_driver.cc",
        "      changes_.count(before, view);\n",
        "      changes_.left += static_cast<int>(view.left.count());\n",
        "AgreementDriver.ARankThatSkipsAnEpochKnowsWhoCameAndWent",
    ),
]

if __name__ == "__main__":
    sys.exit(mutated_tests.main(__doc__ or "", MUTATIONS))
