"""Break a rule of the data loop, or a part of the simulator's digest; a named test must fail.

The simulator runs few of these rules, and its seeds notice few of them: mutations.py has those that
they notice. docs/evidence/simulator.md has the rules, by the numbers here. See mutated_tests.py for
what is expected of each.

    python tests/cpp/proof/programs/core_mutations.py --check
    python tests/cpp/proof/programs/core_mutations.py [--work FOLDER] [--only NAME …]
"""

from __future__ import annotations

import sys

import mutated_tests
from mutated_tests import Mutation

_CLOSING = "DataLoopRules.AClosingRankTakesNoNewFramesButFinishesThoseUnderWayAndReadsGoodbyes"
_REFUSED = "DataLoopRules.WhatCannotBeginEndsWithTheFailureOrAtItsDeadlineIfThatIsLost"
_MANY = "DataLoopRules.OfManyOperationsThe64OldestAskAndAllDerivedOnes"
_ROOM = "DataLoopRules.RoomThatComesBackGoesToTheOldestOperationsInOrder"
_LATE = "DataLoopRules.ALateQuestionIsComparedWithTheLast256OperationsThatHaveEnded"
_RECENT = "HistoryTest.RemembersTheLast256ThatHaveEnded"
_NO_MEMORY = "AlthoughTheTickFoundNoMemory"
_BEGINS = "DataLoopRules.WhatBeginsWithoutMemoryStillHasItsDeadline"


def _rule(name: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, file, old, new, ":".join(tests), "engine")


def _digest(name: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, file, old, new, ":".join(tests), "proof")


MUTATIONS = [
    _rule(
        "1: the data loop ends operations of the host plane",
        "ends.cc",
        "  end_begun(rows, OperationRow::Runs::Elsewhere);\n",
        "  end_begun(rows, OperationRow::Runs::Elsewhere);\n"
        "  end_begun(rows, OperationRow::Runs::InSharedMemory);\n",
        "DataLoopRules.OperationsInSharedMemoryAreForgottenAtTheEndAndNotEnded",
    ),
    _rule(
        "2: a held operation is entered",
        "watched_operations.cc",
        "  tables_.held.push_back(operation);\n",
        "  tables_.held.push_back(operation);\n"
        "  matching::entered(tables_, operation, OperationRow::Runs::Elsewhere, Clock::now());\n",
        "DataLoopRules.AHeldOperationIsNotEnteredSoThisRankIsLate",
    ),
    _rule(
        "3: a followed operation has edges to everyone",
        "watched_operations.cc",
        "  matching::entered(tables_, operation, OperationRow::Runs::Elsewhere, Clock::now());\n",
        "  const auto runs = OperationRow::Runs::Elsewhere;\n"
        "  OperationRow& row = matching::entered(tables_, operation, runs, Clock::now());\n"
        "  for (int peer = 0; peer < tables_.identity.size; ++peer) {\n"
        "    if (peer != tables_.identity.rank) {\n"
        "      row.incoming.emplace_back().peer = peer;\n    }\n  }\n",
        "DataLoopRules.AFollowedOperationHasNoEdgesAndAsksAllRanksAfter200Ms",
    ),
    _rule(
        "4: a stuck operation asks everyone",
        "watched_operations.cc",
        "host_->inGroup(lacking)",
        "host_->inGroup(~hostBit(0))",
        "DataLoopRules.AStuckOperationInSharedMemoryAsksAtOnceThoseThatLackItAndNoOthers",
    ),
    _rule(
        "4: a recalled operation asks everyone",
        "watched_operations.cc",
        "    waiting::asksOnly(tables_, row, {}, Clock::now());\n",
        "",
        "DataLoopRules.AQuestionFindsTheLast64OperationsInSharedMemoryWhichThenAskNobody",
    ),
    # ---- operations that cannot begin
    _rule(
        "5: what cannot begin ends at once",
        "ends.cc",
        "    refused_.push_back(operation);\n",
        "    endRefused(*operation, std::current_exception());\n",
        _REFUSED,
        "DataPlaneRefused.OperationsEndWithTheGroupOldestFirst",
        "NoMemory.AnOperationThatCannotBeginEndsNoSoonerThanItsGroup",
    ),
    _rule(
        "5: a lost failure leaves what cannot begin for ever",
        "data_plane.cc",
        "  endRefusedLate(now);\n",
        "",
        _REFUSED,
    ),
    _rule(
        "5: what cannot be remembered never ends",
        "ends.cc",
        "  } catch (...) { // no memory to remember it\n    endRefused(*operation, cause);\n",
        "  } catch (...) {\n",
        "DataPlaneRefused.WithoutMemoryToRememberItAnOperationEndsAtOnce",
    ),
    _rule(
        "5: what cannot be remembered ends with that, and not with its cause",
        "ends.cc",
        "    endRefused(*operation, cause);\n",
        "    endRefused(*operation, std::current_exception());\n",
        "DataPlaneRefused.WithoutMemoryToRememberItAnOperationEndsAtOnce",
    ),
    _rule(
        "5: a failure that cannot be reported ends nothing",
        "ends.cc",
        "      endRefused(*operation, exception);\n",
        "",
        "DataLoopRules.WhatCannotBeginEndsAtOnceIfNothingCanBeReported",
    ),
    _rule(
        "5: what cannot be reported is not tried again",
        "ends.cc",
        "    unreported_.keep(peer, exception);\n",
        "",
        "DataPlaneRefused.WhatCannotBeReportedIsReportedOnceThereIsMemory",
    ),
    # ---- the three memories of what is over
    _rule(
        "6: fewer descriptors are kept for late comparison",
        "tables.h",
        "kRecent = 256;",
        "kRecent = 64;",
        _LATE,
        _RECENT,
    ),
    _rule(
        "6: more descriptors are kept for late comparison",
        "tables.h",
        "kRecent = 256;",
        "kRecent = 512;",
        _LATE,
        _RECENT,
    ),
    _rule(
        "7: past operations are dropped before a pool has been sent",
        "credit.cc",
        "const int64_t over = to.eager_sent - tables.limits.eager_pool_nbytes;",
        "const int64_t over = to.eager_sent - tables.limits.eager_pool_nbytes / 4;",
        "Credit.PastOperationsAreNoMoreThanThereAreFramesInAPoolHoweverManyEndTogether",
    ),
    _rule(
        "7: past operations are kept after a pool has been sent",
        "credit.cc",
        "  while (!to.past.empty() && to.past.front().sent < over) {\n",
        "  while (false) {\n",
        "Credit.CreditForAnOperationThatHasEndedIsPastUntilAPoolMoreHasBeenSent",
    ),
    _rule(
        "8: fewer operations in shared memory are found",
        "host_plane.h",
        "std::array<std::shared_ptr<Operation>, 64> recent_;",
        "std::array<std::shared_ptr<Operation>, 16> recent_;",
        "HostPosting.TheLast64AreRemembered",
        "DataLoopRules.AQuestionFindsTheLast64OperationsInSharedMemoryWhichThenAskNobody",
    ),
    _rule(
        "9: messages are past",
        "credit.cc",
        "edge.limit != kNoLimit || message || edge.eager_sent < over",
        "edge.limit != kNoLimit || (message && false) || edge.eager_sent < over",
        "DataLoopRules.AMessageIsNeverKeptAsPastAndACollectiveIs",
    ),
    # ---- places for what a peer is ahead with
    _rule(
        "10: collectives take places of messages",
        "matching.cc",
        "message ? asks.messages < places ",
        "message ? asks.messages + asks.collectives < places ",
        "Matching.ManyCollectivesAheadTakeNoPlacesOfMessages",
        "UnexpectedTest.EachPeerHasPlacesForCollectivesAndForMessages",
    ),
    _rule(
        "10: messages take places of collectives",
        "matching.cc",
        ": asks.collectives < places);",
        ": asks.collectives + asks.messages < places);",
        "Matching.ManyMessagesAheadTakeNoPlacesOfCollectives",
    ),
    _rule(
        "10: a question for messages makes no place",
        "matching.cc",
        "asks.messages < places + asks.asked ",
        "asks.messages < places ",
        "Matching.WhatIsAskedForHasAPlace",
        "UnexpectedTest.AQuestionForMessagesMakesAPlaceForOneMore",
    ),
    # ---- order
    _rule(
        "11: the newest operations ask",
        "waiting.cc",
        "  for (auto at = tables.entered.begin(); at != tables.entered.end(); ++at) {\n"
        "    if (!asks(at->second)) {\n",
        "  for (auto at = tables.entered.begin(); at != tables.entered.end(); ++at) {\n"
        "    const auto begin = tables.entered.begin();\n"
        "    const auto index = std::distance(begin, at);\n"
        "    const auto end = tables.entered.lower_bound(kDerivedIdBit);\n"
        "    const auto counted = std::distance(begin, end);\n"
        "    const auto most = static_cast<std::ptrdiff_t>(tables.limits.max_asking);\n"
        "    if (!asks(at->second) || (index < counted && counted - index > most)) {\n",
        _MANY,
        "Matching.OfManyOperationsTheOldestAsk",
    ),
    _rule(
        "11: all operations ask",
        "waiting.cc",
        "asking++ == tables.limits.max_asking) {",
        "asking++ == tables.limits.max_asking + tables.entered.size()) {",
        _MANY,
        "Matching.OfManyOperationsTheOldestAsk",
    ),
    _rule(
        "11: fewer than 64 operations ask",
        "tables.h",
        "size_t max_asking = 64;",
        "size_t max_asking = 32;",
        _MANY,
    ),
    _rule(
        "11: derived operations wait for counted ones",
        "waiting.cc",
        "at = tables.entered.lower_bound(kDerivedIdBit); // these",
        "at = tables.entered.end(); // these",
        _MANY,
        "Matching.OfManyOperationsTheOldestAsk",
    ),
    _rule(
        "11: room goes to the newest operations",
        "tables.cc",
        "  std::vector<Action> taken = std::exchange(actions, {});\n",
        "  std::vector<Action> taken = std::exchange(actions, {});\n"
        "  std::reverse(credit_actions.begin(), credit_actions.end());\n",
        _ROOM,
        "Credit.RoomThatComesBackIsForTheOldestOperation",
    ),
    # ---- who has come
    _rule(
        "12: data makes a rank come",
        "matching.cc",
        "      if (header.type != FrameType::Data) {",
        "      if (true) {",
        "Matching.DataDoesNotMakeARankComeSoItTakesNoMemory",
    ),
    _rule(
        "12: questions and credit do not make a rank come",
        "matching.cc",
        "      if (header.type != FrameType::Data) {",
        "      if (false) {",
        "WaitingTest.ARankThatHasEnteredSinceIsNotMissing",
    ),
    # ---- the end of a group
    _rule(
        "13: frames count after a failure was found",
        "matching.cc",
        "  tables.failed = true;\n",
        "",
        "DataLoopRules.NothingCountsOnceAFailureIsFoundAlthoughTheGroupHasNotFailedYet",
    ),
    _rule(
        "13: an exception of this rank's own stops nothing",
        "ends.cc",
        "    tables_.failed = tables_.failed || isOwnTrouble(record.code);",
        "   ",
        "DataPlaneRefused.NothingLeavesBehindAMessageThatCouldNotBegin",
    ),
    _rule(
        "13: a closing rank takes new frames",
        "data_plane.cc",
        "  if (!running() || tables_.failed || header.type == FrameType::Goodbye) {",
        "  if (failure_ || tables_.failed || header.type == FrameType::Goodbye) {",
        _CLOSING,
    ),
    _rule(
        "13: a closing rank reads nothing more",
        "data_plane.cc",
        "  if (failure_) {\n    return;\n  }\n  if (header.type == FrameType::Goodbye) {",
        "  if (!running()) {\n    return;\n  }\n  if (header.type == FrameType::Goodbye) {",
        _CLOSING,
    ),
    _rule(
        "14: actions are executed in another order",
        "tables.cc",
        "  return taken;\n",
        "  std::reverse(taken.begin(), taken.end());\n  return taken;\n",
        _ROOM,
    ),
    # ---- statements whose order survives std::bad_alloc
    _rule(
        "15: a deadline counts as reported before it is",
        "waiting.cc",
        "  TimePoint next = TimePoint::max();\n  for (auto& [op_id, row] : tables.entered) {\n",
        "  TimePoint next = TimePoint::max();\n  tables.next_deadline = next;\n"
        "  for (auto& [op_id, row] : tables.entered) {\n",
        f"DataLoopRules.TheDeadlineOfAnOperationIsReported{_NO_MEMORY}",
    ),
    _rule(
        "15: a held operation's deadline counts as reported before it is",
        "watched_operations.cc",
        "  TimePoint next = TimePoint::max();\n  for (const auto& operation : tables_.held) {\n",
        "  TimePoint next = TimePoint::max();\n  next_deadline_ = next;\n"
        "  for (const auto& operation : tables_.held) {\n",
        f"DataLoopRules.TheDeadlineOfAHeldOperationIsReported{_NO_MEMORY}",
    ),
    _rule(
        "15: a message's deadline counts as reported before it is",
        "messages.cc",
        "  TimePoint next = TimePoint::max();\n  const auto isOver",
        "  TimePoint next = TimePoint::max();\n  next_deadline_ = next;\n  const auto isOver",
        f"DataLoopRules.TheDeadlineOfAMessageIsReported{_NO_MEMORY}",
    ),
    _rule(
        "15: an operation without a deadline is kept",
        "matching.cc",
        "    forget(tables, row);\n    throw;\n",
        "    throw;\n",
        _BEGINS,
        "Matching.AnOperationThatGetsNoMemoryLeavesNothing",
    ),
    _rule(
        "15: an operation that nobody runs is kept",
        "transfers.cc",
        "now, [this](OperationRow& built) {\n"
        "    built.transfer = "
        "std::make_unique<Transfer>(tables_, built, staging_, send_frame_, working_);\n"
        "  });\n",
        "now);\n"
        "  row.transfer = "
        "std::make_unique<Transfer>(tables_, row, staging_, send_frame_, working_);\n",
        _BEGINS,
        "TransfersTest.WithoutMemoryForAnOperationTheTablesAreAsBefore",
    ),
    _rule(
        "15: a ticket is taken before there is memory for its operation",
        "host_plane.cc",
        "  posted_.push_back(made); // the last that takes memory: a ticket that nobody enters "
        "would hold up all that come after\n  shared.ticket = ++last_ticket_;\n",
        "  shared.ticket = ++last_ticket_;\n  posted_.push_back(made);\n",
        "HostPosting.WithoutMemoryNoTicketIsTaken",
    ),
    _rule(
        "15: half of an operation without memory is kept",
        "matching.cc",
        "  credit::forget(tables, row);\n  tables.entered",
        "  tables.entered",
        "Matching.AnOperationThatGetsNoMemoryLeavesNothing",
    ),
    _rule(
        "15: the oldest that has ended is forgotten without memory",
        "matching.cc",
        "    age(tables, oldest->first, oldest->second); "
        "// first: without memory it stays where it is\n"
        "    tables.recent.erase(oldest);\n"
        "    tables.recent_order.pop_front();\n",
        "    const auto taken = tables.recent.extract(oldest);\n"
        "    tables.recent_order.pop_front();\n"
        "    age(tables, taken.key(), taken.mapped());\n",
        "HistoryTest.WithoutMemoryNoHalfOfAnOperationIsRemembered",
    ),
    _rule(
        "15: a mismatch goes with its operation",
        "matching.cc",
        "first + (found == tables.actions.end() ? 0 : 1)",
        "first",
        "DataPlaneRefused.AMismatchThatWasFoundIsReportedEvenIfTheOperationThenGetsNoMemory",
    ),
    _rule(
        "15: what stops the host plane is reported once",
        "host_plane.cc",
        "  reportTrouble();\n  uint64_t blocked = 0;\n",
        "  uint64_t blocked = 0;\n",
        "HostPlane.WhatStopsThePlaneIsReportedOnceThereIsMemory",
    ),
    _rule(
        "17: both ends of a message to oneself are one operation",
        "data_plane.cc",
        "    header.op_id ^= PointToPoint::kSelfBit;\n",
        "",
        "DataLoopRules.AMessageToOneselfIsTwoOperationsWhoseIdsDifferInOneBit",
    ),
    # ---- what the digest has
    _digest(
        "digest: headers are left out",
        "wire_audit.cc",
        "  digest_.add(header);\n",
        "",
        "Digest.OfARunHasTheHeadersOfItsFramesAndTheirPayloads",
    ),
    _digest(
        "digest: payloads are left out",
        "wire_audit.cc",
        "  digest_.addBytes(bytes.ptr, bytes.nbytes);\n",
        "  static_cast<void>(bytes);\n",
        "Digest.OfARunHasTheHeadersOfItsFramesAndTheirPayloads",
    ),
    _digest(
        "digest: descriptors are left out",
        "verdict.cc",
        "      digest.add(outcome->descriptor);\n",
        "",
        "DigestOfAnOutcome.HasItsDescriptorAndItsName",
    ),
    # ---- held messages
    _rule(
        "16: a send overtakes a held one",
        "messages.cc",
        "const bool behind = queue.has(request.descriptor.tag);",
        "const bool behind = false;",
        "HeldMessages.ALaterSendOfTheTagDoesNotOvertake",
    ),
    _rule(
        "16: a held receive begins when its message comes",
        "messages.cc",
        "held = held_.find(message.get()); held != held_.end()) {",
        "held = held_.find(message.get()); false) {",
        "HeldMessages.ALaterReceiveOfTheTagDoesNotTakeTheMessageOfAHeldOne",
    ),
    # ---- the failure of a group
    _rule(
        "18: a failure reaches shared memory by the data loop",
        "planes.cc",
        "    host_->fail(cause, events_.ending, [this] { onEnded(); });\n",
        "    data_loop_.post([this, cause] {\n"
        "      host_->fail(cause, events_.ending, [this] { onEnded(); });\n    });\n",
        "Planes.AFailureReachesSharedMemoryWithoutTheDataLoop",
    ),
    _rule(
        "18: all has ended once one plane has",
        "planes.cc",
        "unended_.store(host_ == nullptr ? 1 : 2,",
        "unended_.store(1,",
        "Planes.AFailureReachesSharedMemoryWithoutTheDataLoop",
    ),
    _digest(
        "digest: inputs are left out",
        "verdict.cc",
        "      digest.addBytes(input.data(), input.size());\n",
        "",
        "DigestOfAnOutcome.HasItsInput",
    ),
    _digest(
        "digest: results are left out",
        "verdict.cc",
        "      digest.addBytes(outcome->output.data(), outcome->output.size());\n",
        "",
        "DigestOfAnOutcome.HasEachByteOfItsResult",
    ),
    _digest(
        "digest: errors are left out",
        "verdict.cc",
        "      digest.add(*error);\n",
        "      static_cast<void>(0);\n",
        "DigestOfAnOutcome.HasItsError",
    ),
    # ---- the monitor
    _rule(
        "19: news that came late is lost with what a goodbye explains",
        "membership.cc",
        "  learnLate();\n  if (decideAt() <= now) {\n",
        "  if (decideAt() <= now) {\n",
        "Membership.NewsThatCameLateCountsOnceTheGoodbyeExplainsWhatWasToBeChosen",
        "Membership.NewsThatCameLateCountsBesideACandidateThatIsNotDueYet",
    ),
    # ---- a turn of the loop is short
    _rule(
        "20: all steps begin at once",
        "transfer.cc",
        "  begin(kPageSteps);\n",
        "  begin(prepared_.schedule.steps.size());\n",
        "DataLoopRules.ATurnBeginsABoundedNumberOfSteps",
    ),
    _rule(
        "21: the data loop releases large memory itself",
        "event_loop.cc",
        "if (discards_on_ != nullptr) {",
        "if (false) {",
        "LargeMemory.ScratchIsReleasedBesideTheDataLoop",
        "LargeMemory.ALargeScheduleIsReleasedBesideTheDataLoop",
    ),
    _rule(
        "21: the data loop keeps the last reference to a large operation",
        "data_plane.cc",
        "  letGo(node.mapped());\n",
        "",
        "LargeMemory.ALargeScheduleIsReleasedBesideTheDataLoop",
    ),
    # ---- what an idle group keeps in tables that the simulator does not fill; unexpected frames
    # have none of their own, they are in the rows of operations
    _rule(
        "22: operations in shared memory that are watched stay when they end",
        "watched_operations.cc",
        "  host_->tellEnd(*operation); // first",
        "  // first",
        "IdleGroup.KeepsNothingOfOperationsInSharedMemoryThatAPeerSpokeOf",
        "IdleGroup.KeepsNothingOfOperationsInSharedMemoryThatARankWasLateFor",
    ),
    _rule(
        "22: operations in shared memory that have ended are pending",
        "host_plane.cc",
        "  pending_.fetch_sub(1, std::memory_order_seq_cst);\n  operation.finish(std::nullopt);\n",
        "  operation.finish(std::nullopt);\n",
        "IdleGroup.KeepsNothingOfOperationsInSharedMemoryThatAPeerSpokeOf",
    ),
    _rule(
        "22: followed operations stay when they end",
        "data_plane.cc",
        "    operation.finish(std::nullopt);\n  }\n}\n\n// ---- peers come and go",
        "    operation.finish(std::nullopt);\n  }\n"
        "  tables_.entered.emplace(op_id, std::move(node.mapped()));\n}\n\n"
        "// ---- peers come and go",
        "DataLoopRules.AFollowedOperationThatHasEndedIsForgotten",
    ),
    _rule(
        "22: what could not begin stays when the group ends",
        "ends.cc",
        "  for (const auto& operation : std::exchange(refused_, {})) {\n"
        "    end(*operation, nullptr);\n",
        "  for (const auto& operation : refused_) {\n    end(*operation, nullptr);\n",
        "DataPlaneRefused.OperationsEndWithTheGroupOldestFirst",
    ),
    _rule(
        "22: the history has no bound",
        "matching.cc",
        "  if (tables.recent_order.size() == Tables::kRecent) {\n",
        "  if (false) {\n",
        _RECENT,
    ),
]


if __name__ == "__main__":
    sys.exit(mutated_tests.main(__doc__ or "", MUTATIONS))
