"""Break a rule of the engine's lane, or a part of the simulator's digest; a named test must fail.

The simulator runs few of these rules, and its seeds notice few of them: mutations.py has those that
they notice. docs/simulator.md has the rules, by the numbers here. See mutated_tests.py for what is
expected of each.

    python tests/cpp/proof/programs/core_mutations.py --check
    python tests/cpp/proof/programs/core_mutations.py [--work FOLDER] [--only NAME …]
"""

from __future__ import annotations

import sys

import mutated_tests
from mutated_tests import Mutation

_CLOSING = "LaneRules.AClosingRankTakesNoNewFramesButFinishesThoseUnderWayAndReadsGoodbyes"
_REFUSED = "LaneRules.WhatCannotBeginEndsWithTheFailureOrAtItsDeadlineIfThatIsLost"
_MANY = "LaneRules.OfManyOperationsThe64OldestAskAndAllDerivedOnes"
_ROOM = "LaneRules.RoomThatComesBackGoesToTheOldestOperationsInOrder"
_LATE = "LaneRules.ALateQuestionIsComparedWithTheLast256OperationsThatHaveEnded"
_RECENT = "EntryHistory.RemembersTheLast256ThatHaveEnded"
_NO_MEMORY = "AlthoughTheTickFoundNoMemory"
_BEGINS = "LaneRules.WhatBeginsWithoutMemoryStillHasItsDeadline"


def _rule(name: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, file, old, new, ":".join(tests), "engine")


def _digest(name: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, file, old, new, ":".join(tests), "proof")


MUTATIONS = [
    _rule(
        "1: the lane ends operations of the host plane",
        "watched_operations.cc",
        "  watched_.clear();\n",
        "  for (const auto& entry : std::exchange(watched_, {})) {\n    end(*entry.second);\n  }\n",
        "LaneRules.OperationsInSharedMemoryAreForgottenAtTheEndAndNotEnded",
    ),
    _rule(
        "2: a held operation is entered",
        "watched_operations.cc",
        "  held_.insert(operation);\n",
        "  held_.insert(operation);\n  const Operation::Request& request = operation->request();\n"
        "  protocol_.posted(\n      request.id, request.descriptor, PreparedSchedule(), "
        "Clock::now(), request.deadline);\n",
        "LaneRules.AHeldOperationIsNotEnteredSoThisRankIsLate",
    ),
    _rule(
        "3: a followed operation has edges to everyone",
        "watched_operations.cc",
        "  followed_.emplace(request.id.id, operation);\n  try {\n"
        "    protocol_.posted(request.id, request.descriptor, PreparedSchedule(),",
        "  followed_.emplace(request.id.id, operation);\n  try {\n"
        "    PreparedSchedule everyone;\n"
        "    for (int peer = 0; peer < identity_.size; ++peer) {\n"
        "      if (peer != identity_.rank) {\n"
        "        everyone.incoming.emplace_back();\n"
        "        everyone.incoming.back().peer = peer;\n      }\n    }\n"
        "    protocol_.posted(request.id, request.descriptor, everyone,",
        "LaneRules.AFollowedOperationHasNoEdgesAndAsksAllRanksAfter200Ms",
    ),
    _rule(
        "4: a stuck operation asks everyone",
        "watched_operations.cc",
        "host_->inGroup(lacking)",
        "host_->inGroup(~hostBit(0))",
        "LaneRules.AStuckOperationInSharedMemoryAsksAtOnceThoseThatLackItAndNoOthers",
    ),
    _rule(
        "4: a recalled operation asks everyone",
        "watched_operations.cc",
        "    protocol_.asksOnly(request.id.id, {}, Clock::now());\n",
        "",
        "LaneRules.AQuestionFindsTheLast64OperationsInSharedMemoryWhichThenAskNobody",
    ),
    # ---- operations that cannot begin
    _rule(
        "5: what cannot begin ends at once",
        "refused_operations.cc",
        "    operations_.push_back(operation);\n",
        "    end(*operation, exception);\n",
        _REFUSED,
        "RefusedOperationsTest.OperationsEndWithTheGroup",
        "NoMemory.AnOperationThatCannotBeginEndsNoSoonerThanItsGroup",
    ),
    _rule(
        "5: a lost failure leaves what cannot begin for ever",
        "data_plane.cc",
        "  exchange_.ends().endLate(now);\n",
        "",
        _REFUSED,
    ),
    _rule(
        "5: what cannot be remembered never ends",
        "refused_operations.cc",
        "  } catch (...) { // no memory to remember it\n    end(*operation, exception);\n",
        "  } catch (...) {\n    static_cast<void>(exception);\n",
        "RefusedOperationsTest.WithoutMemoryToRememberItAnOperationEndsAtOnce",
    ),
    _rule(
        "5: a failure that cannot be reported ends nothing",
        "operation_ends.cc",
        "    refused_.endWith(exception);\n",
        "",
        "LaneRules.WhatCannotBeginEndsAtOnceIfNothingCanBeReported",
    ),
    # ---- the three memories of what is over
    _rule(
        "6: fewer descriptors are kept for late comparison",
        "entry_history.h",
        "kRecent = 256;",
        "kRecent = 64;",
        _LATE,
        _RECENT,
    ),
    _rule(
        "6: more descriptors are kept for late comparison",
        "entry_history.h",
        "kRecent = 256;",
        "kRecent = 512;",
        _LATE,
        _RECENT,
    ),
    _rule(
        "7: past operations are dropped before a pool has been sent",
        "credits.cc",
        "const int64_t over = to.eager_sent - config_.eager_pool_nbytes;",
        "const int64_t over = to.eager_sent - config_.eager_pool_nbytes / 4;",
        "Credits.PastOperationsAreNoMoreThanThereAreFramesInAPoolHoweverManyEndTogether",
    ),
    _rule(
        "7: past operations are kept after a pool has been sent",
        "credits.cc",
        "  while (!to.past.empty() && to.past.front().sent < over) {\n",
        "  while (false) {\n",
        "Credits.CreditForAnOperationThatHasEndedIsPastUntilAPoolMoreHasBeenSent",
    ),
    _rule(
        "8: fewer operations in shared memory are found",
        "host_plane.h",
        "std::array<std::shared_ptr<Operation>, 64> recent_;",
        "std::array<std::shared_ptr<Operation>, 16> recent_;",
        "HostPosting.TheLast64AreRemembered",
        "LaneRules.AQuestionFindsTheLast64OperationsInSharedMemoryWhichThenAskNobody",
    ),
    _rule(
        "9: messages are past",
        "credits.cc",
        "edge.limit != kNoLimit || message || edge.eager_sent < over",
        "edge.limit != kNoLimit || (message && false) || edge.eager_sent < over",
        "LaneRules.AMessageIsNeverKeptAsPastAndACollectiveIs",
    ),
    # ---- places for what a peer is ahead with
    _rule(
        "10: collectives take places of messages",
        "unexpected_operations.cc",
        "message ? asks.messages < places_",
        "message ? asks.messages + asks.collectives < places_",
        "Protocol.ManyCollectivesAheadTakeNoPlacesOfMessages",
        "UnexpectedOperationsTest.EachPeerHasPlacesForCollectivesAndForMessages",
    ),
    _rule(
        "10: messages take places of collectives",
        "unexpected_operations.cc",
        ": asks.collectives < places_);",
        ": asks.collectives + asks.messages < places_);",
        "Protocol.ManyMessagesAheadTakeNoPlacesOfCollectives",
    ),
    _rule(
        "10: a question for messages makes no place",
        "unexpected_operations.cc",
        "asks.messages < places_ + asks.asked ",
        "asks.messages < places_ ",
        "Protocol.WhatIsAskedForHasAPlace",
        "UnexpectedOperationsTest.AQuestionForMessagesMakesAPlaceForOneMore",
    ),
    # ---- order
    _rule(
        "11: the newest operations ask",
        "roll_call.h",
        "std::map<uint64_t, Op> ops_; ///< oldest first",
        "std::map<uint64_t, Op, std::greater<>> ops_;",
        _MANY,
        "Protocol.OfManyOperationsTheOldestAsk",
    ),
    _rule(
        "11: all operations ask",
        "roll_call.cc",
        "asking++ == config_.max_asking) {",
        "asking++ == config_.max_asking + ops_.size()) {",
        _MANY,
        "Protocol.OfManyOperationsTheOldestAsk",
    ),
    _rule(
        "11: fewer than 64 operations ask",
        "roll_call_config.h",
        "size_t max_asking = 64;",
        "size_t max_asking = 32;",
        _MANY,
    ),
    _rule(
        "11: derived operations wait for counted ones",
        "roll_call.cc",
        "at = ops_.lower_bound(kDerivedIdBit); // these",
        "at = ops_.end(); // these",
        _MANY,
        "Protocol.OfManyOperationsTheOldestAsk",
    ),
    _rule(
        "11: room goes to the newest operations",
        "credits.h",
        "std::map<uint64_t, Op> ops_; ///< oldest first",
        "std::map<uint64_t, Op, std::greater<>> ops_; ///< newest first",
        _ROOM,
        "Credits.RoomThatComesBackIsForTheOldestOperation",
    ),
    # ---- who has come
    _rule(
        "12: data makes a rank come",
        "roll_call.cc",
        "    if (header.type != FrameType::Data) {",
        "    if (true) {",
        "Protocol.DataDoesNotMakeARankComeSoItTakesNoMemory",
    ),
    _rule(
        "12: questions and credit do not make a rank come",
        "roll_call.cc",
        "    if (header.type != FrameType::Data) {",
        "    if (false) {",
        "RollCallTest.ARankThatHasEnteredSinceIsNotMissing",
    ),
    # ---- the end of a group
    _rule(
        "13: frames count after a failure was found",
        "roll_call_output.cc",
        "  failed_ = true;\n",
        "",
        "LaneRules.NothingCountsOnceAFailureIsFoundAlthoughTheGroupHasNotFailedYet",
    ),
    _rule(
        "13: a closing rank takes new frames",
        "exchange.cc",
        "  if (!end_.running() || protocol_.failed() || header.type == FrameType::Goodbye) {",
        "  if (end_.failed() || protocol_.failed() || header.type == FrameType::Goodbye) {",
        _CLOSING,
    ),
    _rule(
        "13: a closing rank reads nothing more",
        "exchange.cc",
        "  if (end_.failed() || protocol_.failed()) {\n    return;\n  }\n"
        "  if (header.type == FrameType::Goodbye) {",
        "  if (!end_.running() || protocol_.failed()) {\n    return;\n  }\n"
        "  if (header.type == FrameType::Goodbye) {",
        _CLOSING,
    ),
    _rule(
        "14: actions are executed in another order",
        "exchange.cc",
        "    for (Protocol::Action& action : actions) {\n",
        "    std::reverse(actions.begin(), actions.end());\n"
        "    for (Protocol::Action& action : actions) {\n",
        _ROOM,
    ),
    # ---- statements whose order survives std::bad_alloc
    _rule(
        "15: a deadline counts as reported before it is",
        "roll_call.cc",
        "  TimePoint next = TimePoint::max();\n  for (auto& entry : ops_) {\n",
        "  TimePoint next = TimePoint::max();\n  next_deadline_ = next;\n"
        "  for (auto& entry : ops_) {\n",
        f"LaneRules.TheDeadlineOfAnOperationIsReported{_NO_MEMORY}",
    ),
    _rule(
        "15: a held operation's deadline counts as reported before it is",
        "watched_operations.cc",
        "  TimePoint next = TimePoint::max();\n  for (const auto& operation : held_) {\n",
        "  TimePoint next = TimePoint::max();\n  next_deadline_ = next;\n"
        "  for (const auto& operation : held_) {\n",
        f"LaneRules.TheDeadlineOfAHeldOperationIsReported{_NO_MEMORY}",
    ),
    _rule(
        "15: a message's deadline counts as reported before it is",
        "messages.cc",
        "  TimePoint next = TimePoint::max();\n  const auto isOver",
        "  TimePoint next = TimePoint::max();\n  next_deadline_ = next;\n  const auto isOver",
        f"LaneRules.TheDeadlineOfAMessageIsReported{_NO_MEMORY}",
    ),
    _rule(
        "15: a followed operation without a deadline is kept",
        "watched_operations.cc",
        "    followed_.erase(request.id.id);\n    throw;",
        "    throw;",
        _BEGINS,
    ),
    _rule(
        "15: an operation without a deadline is kept",
        "transfers.cc",
        "    transfers_.erase(op_id);\n    throw;",
        "    throw;",
        _BEGINS,
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
        "protocol.cc",
        "    credits_.forget(id.id);\n",
        "",
        "Protocol.AnOperationThatGetsNoMemoryLeavesNothing",
    ),
    _rule(
        "16: both ends of a message to oneself are one operation",
        "exchange.cc",
        "    header.op_id ^= PointToPoint::kSelfBit;\n",
        "",
        "LaneRules.AMessageToOneselfIsTwoOperationsWhoseIdsDifferInOneBit",
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
]


if __name__ == "__main__":
    sys.exit(mutated_tests.main(__doc__ or "", MUTATIONS))
