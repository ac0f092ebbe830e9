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
    "    if (kind_ == Collective::AllReduce) {\n"
    "      own.writes.store(1 + static_cast<uint64_t>(work.offset + position_), "
    f"{_ORDER});\n    }}\n"
)
_OWN = "memory_->own()"


def _walked(name: str, file: str, old: str, new: str, test: str) -> Mutation:
    return Mutation(name, file, old, new, test, mutated_tests.WALK)


MUTATIONS = [
    # ---- slots
    _walked(
        "a slot is written while others read it",
        "host_transfer.cc",
        "      view().allHave(&HostProgress::done, before, blocked);",
        "      (static_cast<void>(blocked), true);",
        "HostWalk.Small",
    ),
    _walked(
        "a slot is written while its own rank reads it",
        "host_transfer.cc",
        "memory_->own().done.load(std::memory_order_relaxed) >= before &&",
        "",
        "HostWalk.Small",
    ),
    _walked(
        "a ticket is stored before what belongs to it",
        "host_transfer.cc",
        "  slot.op_id.store(request().id.id, std::memory_order_relaxed);\n",
        "  slot.op_id.store(request().id.id, std::memory_order_relaxed);\n"
        f"  slot.ticket.store(ticket_, {_ORDER});\n"
        '  PYCOMM_FAULT_POINT("host.enter");\n',
        "HostWalk.Small",
    ),
    _walked(
        "an operation is over before its slots are read",
        "host_plane.cc",
        "    const HostTransfer::AdvanceResult result =\n",
        f"    memory_.own().done.store(transfer.ticket(), {_ORDER});\n"
        "    const HostTransfer::AdvanceResult result =\n",
        "HostWalk.Small",
    ),
    _walked(
        "nobody waits for a rank that has not entered",
        "host_transfer.cc",
        f"    if (slot.ticket.load({_ORDER}) != ticket_) {{\n      blocked |=",
        "    if (false) {\n      blocked |=",
        "HostWalk.Small",
    ),
    _walked(
        "descriptors are not compared",
        "host_transfer.cc",
        "if (theirs != request().descriptor) {",
        "if (false) {",
        "HostWalk.RanksThatDifferWriteNothing",
    ),
    _walked(
        "no second look whether a rank has withdrawn",
        "host_transfer.cc",
        f"    if (view().slot(rank, ticket_).ticket.load({_ORDER}) != ticket_) {{",
        "    if (false) {",
        "HostWalk.OneOfThreeThatLeavesOrFails",
    ),
    # ---- stages
    _walked(
        "a stage is written while its own rank reads it",
        "host_transfer.cc",
        "if (staged_ - collected_ == kHostStages) {",
        "if (false) {",
        "HostWalk.Rounds",
    ),
    _walked(
        "a stage is written while others read it",
        "host_transfer.cc",
        "return round < kHostStages || "
        "view().allHave(&HostProgress::collected, round - kHostStages + 1, blocked);",
        "static_cast<void>(blocked);\n  return round + 1 > 0;",
        "HostWalk.Rounds",
    ),
    _walked(
        "a sum does not wait for stages",
        "host_transfer.cc",
        "return !sums || view().allHave(&HostProgress::staged, base_ + reduced_ + 1, blocked);",
        "return true;",
        "HostWalk.Rounds",
    ),
    _walked(
        "all_reduce does not wait for the others' slices",
        "host_transfer.cc",
        "return view().allHave(&HostProgress::reduced, count, blocked);",
        "return true;",
        "HostWalk.Rounds",
    ),
    _walked(
        "all_gather does not wait for the others' stages",
        "host_transfer.cc",
        "return view().allHave(&HostProgress::staged, count, blocked);",
        "return true;",
        "HostWalk.Rounds",
    ),
    _walked(
        "broadcast does not wait for the root's stage",
        "host_transfer.cc",
        "if (kind_ == Collective::Broadcast && !isRoot() &&\n",
        "if (false &&\n",
        "HostWalk.Rounds",
    ),
    _walked(
        "a stage is said to be written before it is",
        "host_transfer.cc",
        "void HostTransfer::stage() {\n",
        f"void HostTransfer::stage() {{\n  {_OWN}.staged.store(base_ + staged_ + 1, {_ORDER});\n",
        "HostWalk.Rounds",
    ),
    _walked(
        "a slice is said to be made before it is",
        "host_transfer.cc",
        "  const size_t at = nbytesOf(firstOf(reduced_));\n",
        "  const size_t at = nbytesOf(firstOf(reduced_));\n"
        f"  {_OWN}.reduced.store(base_ + reduced_ + 1, {_ORDER});\n",
        "HostWalk.Rounds",
    ),
    _walked(
        "stages are said to be read before they are",
        "host_transfer.cc",
        "void HostTransfer::collect() {\n",
        "void HostTransfer::collect() {\n"
        f"  {_OWN}.collected.store(base_ + collected_ + 1, {_ORDER});\n",
        "HostWalk.Rounds",
    ),
    # ---- orders: the walk has one only, and fails if the engine asks for another
    _walked(
        "a counter is stored without sequential consistency",
        "host_transfer.cc",
        f"{_OWN}.staged.store(base_ + staged_, {_ORDER});",
        f"{_OWN}.staged.store(base_ + staged_, std::memory_order_release);",
        "HostWalk.Rounds",
    ),
    _walked(
        "a counter is loaded without sequential consistency",
        "host_memory.h",
        f"(progress(other).*counter).load({_ORDER}) < count",
        "(progress(other).*counter).load(std::memory_order_acquire) < count",
        "HostWalk.Rounds",
    ),
    _walked(
        "a rank that is about to sleep says so without sequential consistency",
        "host_memory.h",
        f"progress.waits_for.store(ranks | hostBit(view_.rank), {_ORDER});",
        "progress.waits_for.store(ranks | hostBit(view_.rank), std::memory_order_release);",
        _WAITS,
    ),
    # ---- in place
    _walked(
        "an operation in place ends while others use its tensors",
        "host_transfer.cc",
        "if (!view().allHave(&HostProgress::reduced, base_ + 1, blocked)) {",
        "if (false) {",
        "HostWalk.InPlace",
    ),
    _walked(
        "work in place is said to be done before it is",
        "host_transfer.cc",
        '    static_cast<void>(PYCOMM_FAULT("host.write"));\n',
        f"    own.reduced.store(base_ + 1, {_ORDER});\n"
        '    static_cast<void>(PYCOMM_FAULT("host.write"));\n',
        "HostWalk.InPlace",
    ),
    _walked(
        "an operation in place counts as no round",
        "host_transfer.cc",
        "  rounds += in_place ? 1 : rounds_;\n",
        "  rounds += in_place ? 0 : rounds_;\n",
        "HostWalk.OneAfterAnother",
    ),
    _walked(
        "an operation in place is not collected",
        "host_transfer.cc",
        f"  own.collected.store(base_ + 1, {_ORDER});\n",
        "",
        "HostWalk.OneAfterAnother",
    ),
    _walked(
        "a rank that has left after its end looks as if it had given up",
        "host_transfer.cc",
        f"        progress.done.load({_ORDER}) < ticket_) {{",
        "        ticket_ != 0) {",
        "HostWalk.InPlace",
    ),
    _walked(
        "nobody looks whether the operands that were read have lasted",
        "host_transfer.cc",
        "  if (!operandsLasted(blocked)) {\n    return AdvanceResult::Blocked;\n  }\n  own.",
        "  own.",
        _LEAVES,
    ),
    # ---- writes into others' tensors
    _walked(
        "a write into others' tensors is not announced",
        "host_transfer.cc",
        _ANNOUNCES,
        "",
        _LEAVES,
    ),
    _walked(
        "a write is announced after the look whether a rank has given up",
        "host_transfer.cc",
        f"{_ANNOUNCES}    if (!operandsLasted(blocked)) {{\n"
        f"      own.writes.store(0, {_ORDER});\n      return AdvanceResult::Blocked;\n    }}\n",
        "    if (!operandsLasted(blocked)) {\n      return AdvanceResult::Blocked;\n    }\n"
        f"{_ANNOUNCES}",
        _LEAVES,
    ),
    _walked(
        "a rank writes although another has given up",
        "host_transfer.cc",
        "    if (!operandsLasted(blocked)) {\n      own.writes",
        "    if (false) {\n      own.writes",
        _LEAVES,
    ),
    _walked(
        "a write that does not begin stays announced",
        "host_transfer.cc",
        f"    if (!operandsLasted(blocked)) {{\n      own.writes.store(0, {_ORDER});\n",
        "    if (!operandsLasted(blocked)) {\n",
        _LEAVES,
    ),
    _walked(
        "a write is said to be over before it is",
        "host_transfer.cc",
        "      allReduceInPlace(work.offset + position_, count);\n",
        f"      own.writes.store(0, {_ORDER});\n"
        '      PYCOMM_FAULT_POINT("host.write");\n'
        "      allReduceInPlace(work.offset + position_, count);\n",
        _LEAVES,
    ),
    _walked(
        "a write that is over stays announced",
        "host_transfer.cc",
        "      allReduceInPlace(work.offset + position_, count);\n"
        f"      own.writes.store(0, {_ORDER});\n",
        "      allReduceInPlace(work.offset + position_, count);\n",
        _LEAVES,
    ),
    _walked(
        "a rank whose group fails waits for no write",
        "host_plane.cc",
        "      endAll(why, oldest);\n",
        "      dead_.store(~uint64_t{0});\n      endAll(why, oldest);\n",
        _LEAVES,
    ),
    _walked(
        "a rank that leaves waits for no write",
        "host_plane.cc",
        "  endAll(reason, nullptr);\n",
        "  dead_.store(~uint64_t{0});\n  endAll(reason, nullptr);\n",
        _LEAVES,
    ),
    # ---- the end
    _walked(
        "a rank whose group fails does not say that it gives up",
        "host_plane.cc",
        f"      memory_.own().left.store(kGaveUp, {_ORDER}); // before operands are let go of\n",
        "",
        _LEAVES,
    ),
    _walked(
        "what is given up stays entered",
        "host_plane.cc",
        "    queue_[i].transfer.withdraw();\n",
        "",
        _LEAVES,
    ),
    _walked(
        "what a failure ends stays entered",
        "host_plane.cc",
        "      withdrawAll();\n",
        "",
        _LEAVES,
    ),
    _walked(
        "what a rank that leaves has not ended stays entered",
        "host_plane.cc",
        f"    withdrawAll();\n    left.store(kLeftInOrder, {_ORDER});",
        f"    left.store(kLeftInOrder, {_ORDER});",
        _LEAVES,
    ),
    _walked(
        "a failure ends what all have done their part for",
        "host_plane.cc",
        "      finishAll();\n",
        "",
        _LEAVES,
    ),
    _walked(
        "a rank that leaves gives up what all have done their part for",
        "host_plane.cc",
        "    finishAll();\n    const Operation",
        "    const Operation",
        _LEAVES,
    ),
    # ---- bells
    _walked(
        "nobody rings when it has entered",
        "host_plane.cc",
        "    transfer.enter();\n    bell_.ringOthers();\n",
        "    transfer.enter();\n",
        _THREE_WAIT,
    ),
    _walked(
        "nobody rings after a step",
        "host_plane.cc",
        "      if (transfer.large()) {\n        bell_.ringOthers();\n      }\n",
        "",
        _WAITS,
    ),
    _walked(
        "nobody rings when it has ended an operation",
        "host_plane.cc",
        "done.store(entry.transfer.ticket(), std::memory_order_seq_cst);\n  bell_.ringOthers();\n",
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
        "  const bool moved = step(still);",
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
        "  uint64_t still = 0;\n  const bool moved = step(still);\n",
        "  const uint64_t left = haveLeft();\n"
        "  uint64_t still = 0;\n  const bool moved = step(still);\n"
        "  const uint32_t rung = bell_.expect(blocked);\n",
        _WAITS,
    ),
    _walked(
        "a ring does not change the bell",
        "host_memory.h",
        "    progress.bell.fetch_add(1, std::memory_order_seq_cst);\n    futexWake",
        "    futexWake",
        _WAITS,
    ),
    _walked(
        "a rank that leaves after the second look is reported",
        "host_plane.cc",
        "  if (!moved && (still & left) != 0) {\n    reportLeft(still & left);",
        "  static_cast<void>(left);\n"
        "  if (const uint64_t gone = haveLeft(); !moved && (still & gone) != 0) {\n"
        "    reportLeft(still & gone);",
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
