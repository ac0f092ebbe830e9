"""Break the engine on purpose, one line at a time; count the simulator's seeds that notice.

Each mutation is built in a copy of csrc and run over seeds of one group, seeds with messages and
codecs, of ranks that leave, and of several groups. A mutation that no seed notices is a hole in
the simulator, or a line that does nothing: its entry says which, or the program fails. It also
fails, before it builds anything, if the text of a mutation no longer stands exactly once in its
file.

    python tests/cpp/proof/programs/mutations.py --check
    python tests/cpp/proof/programs/mutations.py [--seeds 10000] [--only NAME …] [--out FILE]

Prints a table: how many seeds of each kind fail, the first of them, and the promise that it breaks.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mutated
from mutated import Tally, Verdict

ENGINE = Path("csrc", "engine")
BUILD = "build/cpp-plain"
KINDS = {
    "one group": 0,
    "messages, codecs": 1_000_000_000_000,
    "leaving": 1_500_000_000_000,
    "several": 2_000_000_000_000,
}
"""The seed before the first of each kind, as in csrc/proof/sim/plan.h."""
LIMIT_S = 300  # of one kind of seeds; a mutation can make a run endless


class Mutation(NamedTuple):
    name: str
    file: str  # its name; it lies in csrc/engine or a subfolder
    old: str
    new: str
    kept: int = 0
    """A seed of sim_test.cc that notices it. Only one in tens of thousands does."""
    survives: str = ""
    """Why no seed is expected to notice it."""


MUTATIONS = [
    Mutation(
        "never raise credit",
        "credit.cc",
        "    if (edge->limit != kNoLimit) { // an edge that goes eagerly needs no credit\n"
        "      grant(tables, row.id().id, *edge, true);\n    }\n",
        "",
    ),
    Mutation(
        "raise credit by half a window",
        "credit.cc",
        "tables.limits.window_nbytes / 4 || limit == edge.total",
        "tables.limits.window_nbytes / 2 || limit == edge.total",
        kept=65653,
    ),
    Mutation(
        "ignore credit when sending",
        "credit.cc",
        "if (edge.limit != kNoLimit && edge.moved + nbytes <= edge.limit)",
        "if (edge.limit != kNoLimit)",
    ),
    Mutation(
        "never give pool room back",
        "credit.cc",
        "if (pool.eager_used >= tables.limits.eager_pool_nbytes / 4 &&",
        "if (pool.eager_used >= tables.limits.eager_pool_nbytes * 1000 &&",
    ),
    Mutation(
        "ignore the pool's size when sending",
        "credit.cc",
        "return within_eager && "
        "pool.eager_out + tables.limits.cost(nbytes) <= tables.limits.eager_pool_nbytes\n",
        "return within_eager\n",
    ),
    Mutation(
        "forget credit of unexpected operations",
        "credit.cc",
        "ahead.limit = std::max(ahead.limit, limit);",
        "ahead.limit = 0;",
    ),
    Mutation(
        "no credit from a crowded pool",
        "credit.cc",
        "if (crowded(tables, peer) && !was_crowded) { // what",
        "if (crowded(tables, peer) && !was_crowded && row != nullptr) { // what",
        survives="only callbacks may issue in another order on each rank; no program here has any",
    ),
    Mutation(
        "do not compare unexpected operations",
        "matching.cc",
        "        compare(tables, expectedFrom(row, peer), peer, ahead.descriptor, request.id);\n",
        "",
    ),
    Mutation(
        "compare no reduce op", "descriptor.cc", "d.dtype, d.reduce_op, d.codec", "d.dtype, d.codec"
    ),
    Mutation(
        "compare no root", "descriptor.cc", "d.algorithm, d.root, d.numel", "d.algorithm, d.numel"
    ),
    Mutation("compare no tag", "descriptor.cc", "d.numel, d.tag, d.digest", "d.numel, d.digest"),
    Mutation(
        "never say who waits",
        "waiting.cc",
        "    for (const int peer : credit::unfinished(row)) {\n",
        "    for (const int peer : std::vector<int>()) {\n",
        survives="a rank that waits asks every rank after 200 ms anyway",
    ),
    Mutation(
        "no merge window",
        "membership.cc",
        "const TimePoint due = now + (mayHaveLeft(record) ? kGoodbyeWithin : merge);",
        "const TimePoint due = now + 0 * merge;",
    ),
    Mutation(
        "do not pass news on",
        "membership.cc",
        "  flood(record, from);\n",
        "  if (from < 0) { flood(record, from); }\n",
    ),
    Mutation(
        "do not flood at all",
        "membership.cc",
        "  actions_.push_back(std::move(flood));\n",
        "",
    ),
    Mutation(
        "blame who hung up although it spoke",
        "membership.cc",
        "(hasSpoken(r.peer) || was_silent(r.rank));",
        "false;",
    ),
    Mutation(
        "the order ignores the kind of cause",
        "membership.cc",
        "causeClass(r.code), vagueness(r), r.peer",
        "0, vagueness(r), r.peer",
    ),
    Mutation(
        "no heartbeats",
        "membership.cc",
        "actions_.push_back(std::move(beat));",
        "",
    ),
    Mutation(
        "never notice silence",
        "membership.cc",
        "now - rank.heard_at < std::chrono::milliseconds(config_.dead_after_ms)",
        "now - rank.heard_at < std::chrono::hours(config_.dead_after_ms)",
    ),
    Mutation(
        "a goodbye does not count",
        "membership.cc",
        "if (rank == nullptr || rank->left || (rank->over && (broke || !doubts(peer)))) {",
        "for (Rank& each : ranks_) {\n    each.left = false;\n  }\n  if (rank == nullptr) {",
    ),
    Mutation(
        "goodbyes are not passed on",
        "membership.cc",
        "  news.except = from;\n  news.left = peer;\n  actions_.push_back(std::move(news));\n",
        "",
        kept=1500000007326,
    ),
    Mutation(
        "a reset is a death at once",
        "membership.cc",
        "(mayHaveLeft(record) ? kGoodbyeWithin : merge)",
        "merge",
        kept=1500000027443,
    ),
    Mutation(
        "no deadlines",
        "waiting.cc",
        "    if (row.deadline.expired(now)) {\n",
        "    if (false) {\n",
    ),
    Mutation(
        "unexpected frames are not replayed",
        "data_plane.cc",
        "  transfers_.replayUnexpected(row);\n",
        "",
    ),
    Mutation(
        "operations end before the links stop",
        "ends.cc",
        "  stopTouchingMemory();\n  transfers_",
        "  transfers_",
    ),
    Mutation(
        "a broken link counts at once",
        "leaving.cc",
        "std::move(gone), now + kGoodbyeWithin}",
        "std::move(gone), now}",
    ),
    Mutation(
        "late bytes arrive in a group that closes",
        "in_links.cc",
        "  for (PeerLink& peer : peers_) {\n    if (peer.in != nullptr) {\n"
        "      peer.in->channel.stopTouchingMemory();\n    }\n  }\n",
        "",
    ),
    Mutation(
        "what is queued leaves after a group was closed",
        "out_links.cc",
        "  for (PeerLink& peer : peers_) {\n    if (peer.out != nullptr) {\n"
        "      peer.out->channel.stopTouchingMemory();\n    }\n  }\n",
        "",
    ),
    Mutation(
        "a goodbye may be cut short",
        "out_links.cc",
        "if (port.state() == OutPort::State::Closing && port.channel.empty() && "
        "!port.link->unsent()) {",
        "if (port.state() == OutPort::State::Closing) {",
    ),
    Mutation(
        "a control goodbye does not wait for the bulk link",
        "leaving.cc",
        "awaiting_it != nullptr && (row.reading == Reading::Ended || lacksCredit(tables, peer));",
        "awaiting_it != nullptr;",
    ),
    Mutation(
        "staged bytes are not copied",
        "local_steps.cc",
        "      return arriving == nullptr ? 0 : prepared_.nbytesOf(step.dst);",
        "      return 0;",
    ),
    Mutation(
        "consumed before the frame has left",
        "transfer.cc",
        "    staged_.erase(index);\n    consumed(index);\n  }\n  ended(index);",
        "    staged_.erase(index);\n  }\n  ended(index);",
    ),
    Mutation(
        "an odd one out is not outvoted",
        "membership.cc",
        "return disagree ? blamed(a) > blamed(b) : precedes(a, b);",
        "return precedes(a, b);",
        survives="Membership.WhoDiffersFromMostIsTheOddOne notices it, a unit test",
    ),
    Mutation(
        "a silent rank's own accusations count",
        "membership.cc",
        "return r.code == ErrorCode::PeerUnresponsive && r.peer == rank && r.rank != rank;",
        "return false;",
    ),
    Mutation(
        "a rank that receives from no neighbour blames one of them",
        "membership.cc",
        "if (others && !heard) {",
        "if (false) {",
    ),
    Mutation(
        "news counts although the choice is due",
        "membership.cc",
        "if (now >= decideAt()) {",
        "if (false) {",
        survives="Membership.NewsThatComesWhenTheChoiceIsDueDoesNotCount notices it, a unit test",
    ),
    Mutation(
        "a rank that slept counts heartbeats that it did not read as missing",
        "membership.cc",
        "        rank.heard_at = std::min(now, rank.heard_at + late);\n",
        "",
    ),
    Mutation(
        "a message counts for each of its frames",
        "messages.cc",
        "      running || matching::isKnown(",
        "      false && matching::isKnown(",
    ),
    Mutation(
        "credit for what has ended is kept",
        "matching.cc",
        "    if (credit::isPast(tables, peer, header.op_id)) {\n",
        "    if (false) {\n",
    ),
    Mutation(
        "credit for what has arrived",
        "credit.cc",
        "  if (edge.passed == edge.frames) {\n    return; // all of it has arrived\n  }\n",
        "",
    ),
    Mutation(
        "an eager frame costs its payload alone",
        "tables.h",
        "return nbytes + frame_nbytes * static_cast<int64_t>(frames);",
        "static_cast<void>(frames);\n    return nbytes;",
    ),
    Mutation(
        "no bound on credit ahead of the sender",
        "credit.cc",
        "if (from.granted_early >= tables.limits.max_ahead) {",
        "if (false) {",
    ),
    Mutation(
        "messages wait for nothing",
        "messages.cc",
        "const bool has_place = !behind && !queue.isReady() && hasPlace(peer, *message);",
        "const bool has_place = !behind && !queue.isReady();",
    ),
    Mutation(
        "a receive does not ask for its message",
        "messages_ask.cc",
        "if (may_have && !row.isAway()) {",
        "if (false) {",
    ),
    Mutation(
        "a question to oneself is taken for a message",
        "data_plane.cc",
        "if (header.op_id != 0 && header.op_id != PointToPoint::kAskId) {",
        "if (header.op_id != 0) {",
    ),
    Mutation(
        "operations that have ended are forgotten",
        "matching.cc",
        "  remember(tables, row.id().id, row.descriptor());\n",
        "",
    ),
    Mutation(
        "a stuck rank does not ask everybody",
        "waiting.cc",
        "if (peer != tables.identity.rank && !known && may_ask) {\n        ask(tables, row, peer);",
        "if (may_ask && !known && false) {\n        ask(tables, row, peer);",
        survives="who is waited for is asked after 2 ms; only operations without edges need more",
    ),
    Mutation(
        "links end at once when a group has failed",
        "ends.cc",
        "    ends_at_ = std::max(ends_at_, failed_at_ + kNews);\n    return;",
        "    return;",
        survives="news has 5 ms of a lead, and where it takes longer no cause is judged",
    ),
    Mutation(
        "a goodbye ends a receive from any rank",
        "leaving.cc",
        "    if (peer.reading == Reading::Open) {\n      return nullptr;\n    }\n",
        "",
        survives="the message is read before the blame comes back as the group's failure",
    ),
    Mutation(
        "no deadline for a receive from any rank",
        "messages.cc",
        "isOver(*entry.second)) {\n      plane_.notice(noMessage(",
        "isOver(*entry.second) && false) {\n      plane_.notice(noMessage(",
    ),
    Mutation(
        "a failure does not reach the data plane",
        "planes.cc",
        "      data_->fail(cause, events_.ending);\n",
        "",
    ),
    Mutation(
        "what the data plane notices stays there",
        "planes.cc",
        "  DataPlane::Events events;\n  events.noticed = [this](ErrorRecord record) {\n"
        "    onControl(",
        "  DataPlane::Events events;\n  events.noticed = [](ErrorRecord record) {\n"
        "    static_cast<void>(",
    ),
    Mutation(
        "a goodbye on a control link is not passed on",
        "planes.cc",
        "onData([peer](DataPlane& data) { data.peerLeft(peer); });",
        "static_cast<void>(peer);",
    ),
    # ---- what an idle group keeps
    Mutation(
        "receives that have their message are kept",
        "messages.cc",
        "  tables_.receives.erase(match.ticket); // only now",
        "  // only now",
    ),
    Mutation(
        "tags are kept that nothing waits under",
        "point_to_point.cc",
        "own : any), from, name});\n"
        "  if (under.messages.empty() && under.receives.empty()) {\n    tags_.erase(tag);\n  }\n",
        "own : any), from, name});\n",
    ),
    Mutation(
        "staging that is released counts",
        "staging_pool.cc",
        "    pool_->taken_nbytes_ -= nbytes_;\n",
        "",
    ),
    Mutation(
        "credit of operations that have ended is kept",
        "credit.cc",
        "  if (std::exchange(edge.granted_early, false)) {\n",
        "  if (std::exchange(edge.granted_early, false) && edge.moved < 0) {\n",
    ),
    Mutation(
        "operations that were unexpected are kept",
        "matching.cc",
        "  auto taken = tables.unexpected.extract(op_id);\n",
        "  auto taken = tables.unexpected.extract(op_id);\n"
        "  if (!taken.empty()) {\n    tables.unexpected.try_emplace(op_id);\n  }\n",
    ),
    Mutation(
        "past operations of peers have no bound",
        "credit.cc",
        "  while (!to.past.empty() && to.past.front().sent < over) {\n",
        "  while (false) {\n",
    ),
    Mutation(
        "used eager bytes stay in the pool",
        "credit.cc",
        "    pool.eager_in -= tables.limits.cost(nbytes);\n",
        "",
    ),
    Mutation(
        "the last question for a control link stays",
        "data_plane.cc",
        "if (!questions_.empty() && running()) {",
        "if (questions_.size() > 1 && running()) {",
    ),
    Mutation(
        "operations that have ended stay entered",
        "data_plane.cc",
        "  letGo(node.mapped());\n",
        "  letGo(node.mapped());\n  tables_.entered.insert(std::move(node));\n",
    ),
    Mutation(
        "messages that have left count as queued",
        "send_queue.h",
        "    --size_;\n",
        "",
    ),
    Mutation(
        "operations that are not unexpected any more take a place",
        "matching.cc",
        "      --places(peer, ahead.descriptor);\n",
        "",
    ),
    Mutation(
        "questions for messages that were received stay open",
        "messages.cc",
        "    peer.asked = 0; // all that they have brought is received\n",
        "",
    ),
    Mutation(
        "operations that are released are kept as held",
        "data_plane.cc",
        "if (watched_.release(operation)) {",
        "if (watched_.holds(*operation)) {",
        survives="no simulated operation is held; Held.SeveralAreReleasedInAnyOrder notices it",
    ),
    Mutation(
        "forgotten operations have no bound",
        "matching.cc",
        "  if (tables.forgotten_order.size() > Tables::kForgotten) {\n",
        "  if (false) {\n",
        survives="no seed has 32,768 operations of callbacks; "
        "HistoryTest.RemembersThatOlderOnesHaveEndedToo notices it, a unit test",
    ),
]


def path_of(tree: Path, mutation: Mutation) -> Path:
    return mutated.path_of(tree / ENGINE, mutation)


def misplaced(tree: Path) -> list[str]:
    """The mutations that do not apply to this tree, in words."""
    return mutated.misplaced(tree, ENGINE, MUTATIONS)


def build(copy: Path) -> Path | None:
    """Build pycomm_simulate of `copy`: the path of the program, or None if it does not compile."""
    # File by file, as a mutation changes one. As deep as the C++ tests' build in the repository:
    # ccache then finds what that has made with PYCOMM_UNITY=0.
    return mutated.build(copy, copy / BUILD, "pycomm_simulate")


class Found(NamedTuple):
    """What the seeds of one kind said."""

    count: int | str
    """How many failed; "all" if the program died or did not end."""
    first: int
    broken: str


def run_seeds(program: Path, first: int, last: int) -> Found:
    command = [str(program), "--seeds", f"{first}:{last}", "--jobs", "2"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Found("all", 0, "did not end")
    if done.returncode not in (0, 1):
        return Found("all", 0, f"died with {done.returncode}")
    total = re.search(r"^all +\d+ +\d+ +(\d+)$", done.stdout, re.MULTILINE)
    seeds = [int(seed) for seed in re.findall(r"^seed (\d+):", done.stdout, re.MULTILINE)]
    violation = re.search(r"VIOLATION: (.*)", done.stdout)
    return Found(
        int(total.group(1)) if total else "all",
        min(seeds, default=0),
        violation.group(1)[:90] if violation else "",
    )


def verdict(mutation: Mutation, program: Path | None, seeds: int) -> Verdict:
    if program is None:
        row = f"| {mutation.name} | does not compile | | | | |"
        return Verdict(row, "does not compile", False)
    found = []
    for base in KINDS.values():
        found.append(run_seeds(program, base + 1, base + seeds))
        if found[-1].count == "all":  # the other kinds would take as long and tell no more
            found += [Found("", 0, "")] * (len(KINDS) - len(found))
            break
    if mutation.kept and not any(each.count for each in found):
        found.append(run_seeds(program, mutation.kept, mutation.kept))
    noticed = next((each for each in found if each.count), None)
    counts = " | ".join(str(each.count) for each in found[: len(KINDS)])
    told = f"{noticed.first or ''} | {noticed.broken}" if noticed else f"| {mutation.survives}"
    row = f"| {mutation.name} | {counts} | {told} |"
    if not mutation.file:
        return Verdict(row, "violations" if noticed else "", False)
    complaint = "" if noticed or mutation.survives else "no seed notices it"
    return Verdict(row, complaint, noticed is not None)


def attempt(copy: Path, chosen: Sequence[Mutation], options: argparse.Namespace) -> Tally:
    mutated.copy_sources(copy)
    heads = " | ".join(KINDS)
    print(f"| mutation | {heads} | first | what it breaks |\n|---|---|---|---|---|---|---|")
    tally, none = Tally(), Mutation("without a mutation", "", "", "")
    tally.add(none, verdict(none, build(copy), options.seeds))
    if tally.wrong:
        return tally
    objects = mutated.Objects(copy, BUILD)
    objects.keep()
    for mutation in chosen:
        with mutated.broken(path_of(copy, mutation), mutation, objects):
            tally.add(mutation, verdict(mutation, build(copy), options.seeds))
    return tally


def main() -> int:
    parser = mutated.parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=10000, help="of each kind")
    return mutated.main(parser, MUTATIONS, misplaced, attempt)


if __name__ == "__main__":
    sys.exit(main())
