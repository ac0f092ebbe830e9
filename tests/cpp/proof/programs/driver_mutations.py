"""Break a rule of what drives the agreement of survivors, one at a time; a named test must fail.

agreement_mutations.py has the rules of the agreement, of which the simulation is the judge. These
are of AgreementDriver and of what it uses: when the seal returns, what a promise says, what other
processes of the host can read, who is dead. See mutated_tests.py for what is expected of each.

    python tests/cpp/proof/programs/driver_mutations.py --check
    python tests/cpp/proof/programs/driver_mutations.py [--work FOLDER] [--only NAME …]
"""

from __future__ import annotations

import sys

import mutated_tests
from mutated_tests import Mutation

_LEAVES = "AgreementDriver.AMemberLeavesWithItsStepAndTheOthersGoOn"
_STAYS = "AgreementDriver.WhoLeavesStaysForAStepThatIsSummedAgain"
_COUNTS = "AgreementDriver.WhoLeavesHasLeftIfItsRoundFailsAndTheStepCounts"
_SEAL = "AgreementDriver.AStepThatFinishesBeforeTheSealCountsAndNoneBehindIt"
_ENDED = "AgreementDriver.AllOperationsOfAnEpochHaveEndedBeforeTheNextBegins"
_PROGRAM = "AgreementDriver.AnErrorOfTheProgramChangesNoMembers"
_KEPT = "AgreementDriver.WhatItHasPromisedIsKeptWhereOthersReadIt"
_CERTIFIED = "AgreementDriver.ADeathOnThisHostIsCertified"
_DELIVERS = "AgreementDriver.DeliversEachStepBeforeTheNextBegins"
_CANNOT_MEET = "AgreementDriver.AMemberThatCannotMeetSaysSoAndTheOthersGoOn"
_DRIVER = "agreement_driver.cc"


def _rule(name: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, file, old, new, ":".join(tests), "engine")


MUTATIONS = [
    # ---- the seal, and what a promise says
    _rule(
        "the seal returns before the planes have failed",
        _DRIVER,
        '  PYCOMM_FAULT_POINT("survive.seal");\n',
        '  inbox_->put(Sealed{job.view.epoch});\n  PYCOMM_FAULT_POINT("survive.seal");\n',
        _SEAL,
    ),
    _rule(
        "the seal fails no operation",
        _DRIVER,
        "    endOperations(*job.old.group, job.why);\n",
        "",
        _ENDED,
    ),
    _rule(
        "a step counts behind the seal",
        _DRIVER,
        "      (void)ledger_.seal();\n",
        "",
        "AgreementDriver.NothingCountsBehindTheSeal",
    ),
    _rule(
        "the agreement does not know how far the step is",
        _DRIVER,
        "  agreement_->step(state);\n",
        "",
        _SEAL,
    ),
    _rule(
        "the end of a seal is no event",
        _DRIVER,
        "    agreement_->sealed(now);\n",
        "",
        _SEAL,
    ),
    # ---- what the training thread gets
    _rule(
        "a step begins although the last one is not delivered",
        _DRIVER,
        "  undelivered_ = true;\n",
        "",
        _DELIVERS,
    ),
    _rule(
        "a step that the others commit is delivered as an error",
        _DRIVER,
        "  const auto counts = [this] { return ledger_.state().committed >= begun_; };\n",
        "  const auto counts = [this] {\n"
        "    return !error_ && ledger_.state().committed >= begun_;\n  };\n",
        _COUNTS,
    ),
    _rule(
        "a step begins in an epoch that ends behind its last commit",
        _DRIVER,
        "    over_ = true; // no step begins before the next view\n",
        "",
        _LEAVES,
    ),
    # ---- leaving
    _rule(
        "no rank's wish to leave is in the commit round",
        "step_ledger.cc",
        "  return Wish{leaving_ == Leaving::Announced, admits_, *round_};\n",
        "  return Wish{false, admits_, *round_};\n",
        _LEAVES,
        _STAYS,
    ),
    _rule(
        "a commit at which somebody leaves ends no epoch",
        _DRIVER,
        "      agreement_->boundary(now, boundary->admits);\n",
        "",
        _LEAVES,
    ),
    _rule(
        "the promise does not say that this rank leaves",
        _DRIVER,
        "  if (leaves) {\n    agreement_->leave();\n  }\n",
        "",
        _LEAVES,
        _COUNTS,
    ),
    _rule(
        "a rank leaves between two steps",
        "step_ledger.h",
        "    return leaving_ == Leaving::Announced || leaving_ == Leaving::Left;\n",
        "    return leaving_ != Leaving::No;\n",
        "AgreementDriver.NobodyLeavesBetweenSteps",
    ),
    _rule(
        "the last step of a rank that leaves is lost if its round fails",
        "step_ledger.cc",
        "    (void)install(next); // the step with which it leaves counts\n",
        "",
        _COUNTS,
    ),
    # ---- who is dead
    _rule(
        "an error of the program is a death",
        _DRIVER,
        "  if (!Agreement::changesMembers(record.code)) {\n    failWith(record);",
        "  if (false) {\n    failWith(record);",
        _PROGRAM,
    ),
    _rule(
        "the failure of a group is no event",
        _DRIVER,
        "        inbox->put(Failed{epoch, *failed->failure(), failed->heardAt()});\n",
        "        (void)inbox;\n        (void)epoch;\n",
        _SEAL,
    ),
    _rule(
        "a meeting that fails is no event",
        _DRIVER,
        "    inbox_->put(NotMet{job.view.epoch, *std::move(failure)});\n",
        "",
        _CANNOT_MEET,
    ),
    _rule(
        "the witness is of this process itself",
        _DRIVER,
        "              recordKey(member.handle.incarnation, secret),\n",
        "              recordKey(place_.visitor().self.incarnation, secret),\n",
        _CERTIFIED,
    ),
    _rule(
        "nobody looks whether a process has ended",
        _DRIVER,
        "      polled.push_back({member.witness->fd(), POLLIN, 0});\n"
        "      owners.emplace_back(&name, &member);\n",
        "",
        _CERTIFIED,
    ),
    _rule(
        "the end of a process is no certificate",
        _DRIVER,
        "    agreement_->certified(name, *kept, now);\n",
        "    agreement_->failed(ErrorCode::PeerDead, name, now);\n",
        _CERTIFIED,
    ),
    # ---- what others read after the end
    _rule(
        "no record is kept",
        _DRIVER,
        "          kept_->keep(*action.record);\n",
        "",
        _KEPT,
        _CERTIFIED,
    ),
    _rule(
        "a record is written over the one that counts",
        "kept_record.cc",
        "contents.places[(kept_ + 1) % 2];",
        "contents.places[kept_ % 2];",
        "KeptRecord.IsReadByOtherProcessesOfTheHost",
    ),
    _rule(
        "the record of another process is believed",
        "kept_record.cc",
        "  if (identity->pid != process.pid || ",
        "  if (",
        "KeptRecord.IsReadByOtherProcessesOfTheHost",
    ),
    _rule(
        "what a member said of the epoch before hides its silence",
        _DRIVER,
        "    const bool of_this_epoch = message->epoch == view.epoch && "
        "message->kind != elastic::Message::Kind::Decide;\n",
        "    const bool of_this_epoch = true;\n",
        "AgreementDriver.WhatAMemberSaysBeforeTheEndOfAnEpochHidesNoSilence",
    ),
    _rule(
        "what a member says while the epoch goes on hides its silence",
        _DRIVER,
        "of_this_epoch && agreement_->isAgreeing();",
        "of_this_epoch;",
        "AgreementDriver.WhatAMemberSaysBeforeTheEndOfAnEpochHidesNoSilence",
    ),
    _rule(
        "a member that has answered is never silent",
        _DRIVER,
        "answers ? now + dead_after + dead_after / 2 : TimePoint::max();\n",
        "answers ? TimePoint::max() : TimePoint::max();\n",
        "AgreementDriver.AMemberThatStopsAfterItsAnswerIsFoundSilent",
    ),
    _rule(
        "a member that pauses just before its next word is due is silent",
        _DRIVER,
        "answers ? now + dead_after + dead_after / 2 : TimePoint::max();\n",
        "answers ? now + dead_after : TimePoint::max();\n",
        "AgreementDriver.APauseThatIsShorterThanASilenceCostsNobodyItsPlace",
    ),
    _rule(
        "a process that was stopped suspects before it has read what has come",
        _DRIVER,
        "    if (now > member.silent_at + dead_after / 30) {",
        "    if (now > member.silent_at + dead_after / 4) {",
        "AgreementDriver.AProcessThatWasStoppedReadsWhatHasComeBeforeItFindsOthersSilent",
    ),
    _rule(
        "of a second silent member only that one is notified",
        "agreement.cc",
        "      accuse(peer, are_told ? std::vector<Incarnation>{peer} : others());\n",
        "      accuse(peer, {peer});\n",
        "AgreementDriver.TwoMembersThatFallSilentAtOnceCostNoMoreThanOne",
    ),
    _rule(
        "a member that closes decides a view of itself alone",
        _DRIVER,
        "        agreement_->retire();\n",
        "",
        "AgreementDriver.AMemberThatClosesDuringAMeetingLeavesNobodyBehind",
    ),
    _rule(
        "a member without memory for its own work stays",
        _DRIVER,
        "      inbox_->fail(); // in whatever epoch",
        "      // in whatever epoch",
        "AgreementDriver.AMemberWithoutMemoryForItsOwnWorkLeavesTheOthers",
    ),
    # ---- messages
    _rule(
        "what a member had not taken is not sent again",
        "outbox.cc",
        "  hangUp();\n  not_before_ = now + milliseconds(kShortPauseMs);\n",
        "  giveUp(now);\n",
        "Outbox.SendsAgainWhatABrokenConnectionHasNotTaken",
    ),
    _rule(
        "messages for a member that is gone pile up",
        "outbox.cc",
        "  if (queue_.size() >= kMost) {\n",
        "  if (false) {\n",
        "Outbox.BringsTheNewestIfThereAreTooMany",
    ),
    _rule(
        "a member speaks for another one",
        "agreement_driver_join.cc",
        "  if (message && message->from == incarnationOf(from)) {\n",
        "  if (message) {\n",
        "AgreementDriver.AMemberSpeaksForItselfOnly",
    ),
]

if __name__ == "__main__":
    sys.exit(mutated_tests.main(__doc__ or "", MUTATIONS))
