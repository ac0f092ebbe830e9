"""Remove one condition of the protocol of shared memory at a time; the walk must notice.

Each mutation takes a condition out of csrc/engine/host. tests/cpp/host_walk, which tries all orders
of loads and stores, must fail in the named test. See mutated_tests.py for what is expected of each.

    python tests/cpp/proof/programs/host_mutations.py --check
    python tests/cpp/proof/programs/host_mutations.py [--work FOLDER] [--only NAME …]
"""

from __future__ import annotations

import sys

import mutated_tests
from mutated_tests import Mutation

_LEAVES = "HostWalk.OneThatLeavesOrFails"
_WAITS = "HostWalk.OneThatWaitsIsWoken"
_THREE_WAIT = f"{_WAITS}:HostWalk.DISABLED_EachOfThreeThatWaitIsWoken"
_ORDER = "std::memory_order_seq_cst"
_ANNOUNCES = (
    "    if (op.kind == Collective::AllReduce) {\n"
    "      own.writes.store(1 + static_cast<uint64_t>(work.offset + position_), "
    f"{_ORDER});\n    }}\n"
)
_OWN = "op.view.progress(op.view.rank)"


def _walked(name: str, file: str, old: str, new: str, test: str) -> Mutation:
    return Mutation(name, file, old, new, test, mutated_tests.WALK)


MUTATIONS = [
    # ---- slots
    _walked(
        "a slot is written while others read it",
        "host_transfer.cc",
        "      view.allHave(&HostProgress::done, before, blocked);",
        "      (static_cast<void>(blocked), true);",
        "HostWalk.Small",
    ),
    _walked(
        "a slot is written while its own rank reads it",
        "host_transfer.cc",
        "view.progress(view.rank).done.load(std::memory_order_relaxed) >= before &&",
        "",
        "HostWalk.Small",
    ),
    _walked(
        "a ticket is stored before what belongs to it",
        "host_transfer.cc",
        "  slot.header.op_id = request.id.id;\n",
        "  slot.header.op_id = request.id.id;\n"
        f"  slot.ticket.store(op_.ticket, {_ORDER});\n"
        '  PYCOMM_FAULT_POINT("host.enter");\n',
        "HostWalk.Small",
    ),
    _walked(
        "an operation is over before its slots are read",
        "host_queue.cc",
        "    const HostTransfer::AdvanceResult result =\n",
        "    parts_.memory.view().progress(parts_.identity.rank).done.store(\n"
        f"        transfer.ticket(), {_ORDER});\n"
        "    const HostTransfer::AdvanceResult result =\n",
        "HostWalk.Small",
    ),
    _walked(
        "nobody waits for a rank that has not entered",
        "host_transfer.cc",
        f"    if (slot.ticket.load({_ORDER}) != op_.ticket) {{\n      blocked |=",
        "    if (false) {\n      blocked |=",
        "HostWalk.Small",
    ),
    _walked(
        "descriptors are not compared",
        "host_transfer.cc",
        "if (Descriptor::readFrom(slot.header) != op_.request().descriptor) {",
        "if (false) {",
        "HostWalk.RanksThatDifferWriteNothing",
    ),
    _walked(
        "no second look whether a rank has withdrawn",
        "host_transfer.cc",
        f"    if (op_.view.slot(rank, op_.ticket).ticket.load({_ORDER}) != op_.ticket) {{",
        "    if (false) {",
        "HostWalk.OneOfThreeThatLeavesOrFails",
    ),
    # ---- stages
    _walked(
        "a stage is written while its own rank reads it",
        "host_rounds.cc",
        "if (staged_ - collected_ == kHostStages) {",
        "if (false) {",
        "HostWalk.Rounds",
    ),
    _walked(
        "a stage is written while others read it",
        "host_rounds.cc",
        "return round < kHostStages || "
        "op.view.allHave(&HostProgress::collected, round - kHostStages + 1, blocked);",
        "static_cast<void>(blocked);\n  return round + 1 > 0;",
        "HostWalk.Rounds",
    ),
    _walked(
        "a sum does not wait for stages",
        "host_rounds.cc",
        "return !sums || op.view.allHave(&HostProgress::staged, base_ + reduced_ + 1, blocked);",
        "return true;",
        "HostWalk.Rounds",
    ),
    _walked(
        "all_reduce does not wait for the others' slices",
        "host_rounds.cc",
        "return op.view.allHave(&HostProgress::reduced, count, blocked);",
        "return true;",
        "HostWalk.Rounds",
    ),
    _walked(
        "all_gather does not wait for the others' stages",
        "host_rounds.cc",
        "return op.view.allHave(&HostProgress::staged, count, blocked);",
        "return true;",
        "HostWalk.Rounds",
    ),
    _walked(
        "broadcast does not wait for the root's stage",
        "host_rounds.cc",
        "if (op.kind == Collective::Broadcast && !op.isRoot() &&\n",
        "if (false &&\n",
        "HostWalk.Rounds",
    ),
    _walked(
        "a stage is said to be written before it is",
        "host_rounds.cc",
        "void HostRounds::stage(const HostOperation& op) {\n",
        "void HostRounds::stage(const HostOperation& op) {\n"
        f"  {_OWN}.staged.store(base_ + staged_ + 1, {_ORDER});\n",
        "HostWalk.Rounds",
    ),
    _walked(
        "a slice is said to be made before it is",
        "host_rounds.cc",
        "  const size_t at = op.nbytesOf(firstOf(reduced_));\n",
        "  const size_t at = op.nbytesOf(firstOf(reduced_));\n"
        f"  {_OWN}.reduced.store(base_ + reduced_ + 1, {_ORDER});\n",
        "HostWalk.Rounds",
    ),
    _walked(
        "stages are said to be read before they are",
        "host_rounds.cc",
        "void HostRounds::collect(const HostOperation& op) {\n",
        "void HostRounds::collect(const HostOperation& op) {\n"
        f"  {_OWN}.collected.store(base_ + collected_ + 1, {_ORDER});\n",
        "HostWalk.Rounds",
    ),
    # ---- in place
    _walked(
        "an operation in place ends while others use its tensors",
        "host_in_place.cc",
        "if (!op.view.allHave(&HostProgress::reduced, base_ + 1, blocked)) {",
        "if (false) {",
        "HostWalk.InPlace",
    ),
    _walked(
        "work in place is said to be done before it is",
        "host_in_place.cc",
        '    static_cast<void>(PYCOMM_FAULT("host.write"));\n',
        f"    own.reduced.store(base_ + 1, {_ORDER});\n"
        '    static_cast<void>(PYCOMM_FAULT("host.write"));\n',
        "HostWalk.InPlace",
    ),
    _walked(
        "an operation in place counts as no round",
        "host_transfer.cc",
        "    rounds += 1;\n",
        "",
        "HostWalk.OneAfterAnother",
    ),
    _walked(
        "an operation in place is not collected",
        "host_in_place.cc",
        f"  own.collected.store(base_ + 1, {_ORDER});\n",
        "",
        "HostWalk.OneAfterAnother",
    ),
    _walked(
        "a rank that has left after its end looks as if it had given up",
        "host_in_place.cc",
        f"        progress.done.load({_ORDER}) < op.ticket) {{",
        "        op.ticket != 0) {",
        "HostWalk.InPlace",
    ),
    _walked(
        "nobody looks whether the operands that were read have lasted",
        "host_in_place.cc",
        "  if (!operandsLasted(op, blocked)) {\n    return AdvanceResult::Blocked;\n  }\n  own.",
        "  own.",
        _LEAVES,
    ),
    # ---- writes into others' tensors
    _walked(
        "a write into others' tensors is not announced",
        "host_in_place.cc",
        _ANNOUNCES,
        "",
        _LEAVES,
    ),
    _walked(
        "a write is announced after the look whether a rank has given up",
        "host_in_place.cc",
        f"{_ANNOUNCES}    if (!operandsLasted(op, blocked)) {{\n"
        f"      own.writes.store(0, {_ORDER});\n      return AdvanceResult::Blocked;\n    }}\n",
        "    if (!operandsLasted(op, blocked)) {\n      return AdvanceResult::Blocked;\n    }\n"
        f"{_ANNOUNCES}",
        _LEAVES,
    ),
    _walked(
        "a rank writes although another has given up",
        "host_in_place.cc",
        "    if (!operandsLasted(op, blocked)) {\n      own.writes",
        "    if (false) {\n      own.writes",
        _LEAVES,
    ),
    _walked(
        "a write that does not begin stays announced",
        "host_in_place.cc",
        f"    if (!operandsLasted(op, blocked)) {{\n      own.writes.store(0, {_ORDER});\n",
        "    if (!operandsLasted(op, blocked)) {\n",
        _LEAVES,
    ),
    _walked(
        "a write is said to be over before it is",
        "host_in_place.cc",
        "      allReduce(op, work.offset + position_, count);\n",
        f"      own.writes.store(0, {_ORDER});\n"
        '      PYCOMM_FAULT_POINT("reduce.step");\n'
        "      allReduce(op, work.offset + position_, count);\n",
        _LEAVES,
    ),
    _walked(
        "a write that is over stays announced",
        "host_in_place.cc",
        "      allReduce(op, work.offset + position_, count);\n"
        f"      own.writes.store(0, {_ORDER});\n",
        "      allReduce(op, work.offset + position_, count);\n",
        _LEAVES,
    ),
    _walked(
        "a rank whose group fails waits for no write",
        "host_plane.cc",
        "      queue_.takeAwayAll(diedFirst(why, identity_));\n",
        "      static_cast<void>(diedFirst(why, identity_));\n",
        _LEAVES,
    ),
    _walked(
        "a rank that leaves waits for no write",
        "host_plane.cc",
        "  queue_.takeAwayAll(0);\n",
        "",
        _LEAVES,
    ),
    # ---- the end
    _walked(
        "a rank whose group fails does not say that it gives up",
        "host_plane.cc",
        f"      view.progress(view.rank).left.store(kGaveUp, {_ORDER});"
        " // before operands are let go of\n",
        "",
        _LEAVES,
    ),
    _walked(
        "what is given up stays entered",
        "host_queue.cc",
        "    queue_[i].transfer.withdraw();\n",
        "",
        _LEAVES,
    ),
    _walked(
        "what a failure ends stays entered",
        "host_plane.cc",
        "      queue_.withdrawAll();\n",
        "",
        _LEAVES,
    ),
    _walked(
        "what a rank that leaves has not ended stays entered",
        "host_plane.cc",
        f"    queue_.withdrawAll();\n    left.store(kLeftInOrder, {_ORDER});",
        f"    left.store(kLeftInOrder, {_ORDER});",
        _LEAVES,
    ),
    _walked(
        "a failure ends what all have done their part for",
        "host_plane.cc",
        "      queue_.finishAll();\n",
        "",
        _LEAVES,
    ),
    _walked(
        "a rank that leaves gives up what all have done their part for",
        "host_plane.cc",
        "    queue_.finishAll();\n    const Operation",
        "    const Operation",
        _LEAVES,
    ),
    # ---- bells
    _walked(
        "nobody rings when it has entered",
        "host_queue.cc",
        "    transfer.enter();\n    parts_.bell.ringOthers();\n",
        "    transfer.enter();\n",
        _THREE_WAIT,
    ),
    _walked(
        "nobody rings after a step",
        "host_queue.cc",
        "      if (transfer.large()) {\n        parts_.bell.ringOthers();\n      }\n",
        "",
        _WAITS,
    ),
    _walked(
        "nobody rings when it has ended an operation",
        "host_queue.cc",
        "done.store(entry.transfer.ticket(), std::memory_order_seq_cst);\n"
        "  parts_.bell.ringOthers();\n",
        "done.store(entry.transfer.ticket(), std::memory_order_seq_cst);\n",
        _WAITS,
    ),
    _walked(
        "nobody rings when it leaves",
        "host_plane.cc",
        f"    left.store(kLeftInOrder, {_ORDER});\n    bell_.ringOthers();\n",
        f"    left.store(kLeftInOrder, {_ORDER});\n",
        _WAITS,
    ),
    _walked(
        "no second look before a rank sleeps",
        "host_plane.cc",
        "  const bool moved = queue_.step(still);",
        "  const bool moved = false;\n  still = blocked;",
        _WAITS,
    ),
    _walked(
        "a rank sleeps although another one is waited for by now",
        "host_plane.cc",
        "if (!moved && still == blocked && ",
        "if (!moved && ",
        _THREE_WAIT,
    ),
    _walked(
        "a rank asks others to ring after the second look",
        "host_plane.cc",
        "  const uint32_t rung = bell_.expect(blocked);\n"
        "  const uint64_t left = haveLeft();\n"
        "  uint64_t still = 0;\n  const bool moved = queue_.step(still);\n",
        "  const uint64_t left = haveLeft();\n"
        "  uint64_t still = 0;\n  const bool moved = queue_.step(still);\n"
        "  const uint32_t rung = bell_.expect(blocked);\n",
        _WAITS,
    ),
    _walked(
        "a ring does not change the bell",
        "host_bell.cc",
        "      progress.bell.fetch_add(1, std::memory_order_seq_cst);\n      futexWake",
        "      futexWake",
        _WAITS,
    ),
    _walked(
        "a rank that leaves after the second look is reported",
        "host_plane.cc",
        "  if (!moved && (still & left) != 0) {\n    queue_.reportLeft(still & left);",
        "  static_cast<void>(left);\n"
        "  if (const uint64_t gone = haveLeft(); !moved && (still & gone) != 0) {\n"
        "    queue_.reportLeft(still & gone);",
        _WAITS,
    ),
    _walked(
        "a rank that leaves before it is asked to ring is not reported",
        "host_plane.cc",
        "  const uint32_t rung = bell_.expect(blocked);\n  const uint64_t left = haveLeft();\n",
        "  const uint64_t left = haveLeft();\n  const uint32_t rung = bell_.expect(blocked);\n",
        _WAITS,
    ),
    _walked(
        "a rank that has left is not reported",
        "host_plane.cc",
        "  if (!moved && (still & left) != 0) {",
        "  if (false) {",
        _WAITS,
    ),
]

if __name__ == "__main__":
    sys.exit(mutated_tests.main(__doc__ or "", MUTATIONS))
