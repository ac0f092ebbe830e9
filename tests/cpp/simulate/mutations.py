"""Break the engine on purpose, one line at a time, and count what the simulator notices.

Each mutation is built in a copy of csrc and run over the seeds. One that survives all of them is a
hole in the simulator, or a line that does nothing. Prints a table: how many seeds of one group
fail, how many of several groups, the first of them, and what it breaks.

    python tests/cpp/simulate/mutations.py --work /tmp/mutations [--seeds 10000] [--only NAME …]
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]


class Mutation(NamedTuple):
    name: str
    file: str  # below csrc/engine
    old: str
    new: str


MUTATIONS = [
    Mutation(
        "never raise credit",
        "protocol_flow.cc",
        "    if (edge->limit > 0) { // an edge that goes eagerly needs no credit\n"
        "      grant(found->second, *edge);\n    }\n",
        "",
    ),
    Mutation(
        "raise credit by half a window",
        "protocol_flow.cc",
        "config_.window_nbytes / 4 || limit == edge.total",
        "config_.window_nbytes / 2 || limit == edge.total",
    ),
    Mutation(
        "ignore credit when sending",
        "protocol_flow.cc",
        "if (edge.limit > 0 && edge.moved + nbytes <= edge.limit)",
        "if (edge.limit > 0)",
    ),
    Mutation(
        "never give pool room back",
        "protocol_flow.cc",
        "if (pool.eager_used >= config_.eager_pool_nbytes / 4)",
        "if (pool.eager_used >= config_.eager_pool_nbytes * 1000)",
    ),
    Mutation(
        "ignore the pool's size when sending",
        "protocol_flow.cc",
        "return early && pool.eager_out + nbytes <= config_.eager_pool_nbytes ?",
        "return early ?",
    ),
    Mutation(
        "forget credit that came early",
        "protocol_flow.cc",
        "known = std::max(known, limit);",
        "known = 0;",
    ),
    Mutation(
        "no credit from a crowded pool",
        "protocol.cc",
        "if (pool.eager_in > config_.eager_pool_nbytes / 2) {\n      grantAllFrom(peer);",
        "if (pool.eager_in > config_.eager_pool_nbytes / 2) {",
    ),
    Mutation(
        "do not compare what was heard before posting",
        "protocol.cc",
        "      compare(descriptor, entry.first, entry.second, id);\n",
        "",
    ),
    Mutation(
        "compare no reduce op", "descriptor.cc", "d.dtype, d.reduce_op, d.wire", "d.dtype, d.wire"
    ),
    Mutation(
        "compare no root", "descriptor.cc", "d.algorithm, d.root, d.numel", "d.algorithm, d.numel"
    ),
    Mutation("compare no tag", "descriptor.cc", "d.numel, d.tag, d.digest", "d.numel, d.digest"),
    Mutation(
        "never say who waits",
        "protocol.cc",
        "      if (edge.moved < edge.total || edge.total == 0) {",
        "      if (false) {",
    ),
    Mutation(
        "no merge window",
        "membership.cc",
        "decide_at_ = now + std::chrono::milliseconds(mismatch ? "
        "config_.merge_mismatches_ms : config_.merge_ms);",
        "decide_at_ = now;",
    ),
    Mutation(
        "do not pass news on",
        "membership.cc",
        "  flood.record = record;\n  actions_.push_back(std::move(flood));",
        "  flood.record = record;\n  if (from < 0) {\n"
        "    actions_.push_back(std::move(flood));\n  }",
    ),
    Mutation(
        "do not flood at all",
        "membership.cc",
        "  flood.record = record;\n  actions_.push_back(std::move(flood));",
        "  flood.record = record;",
    ),
    Mutation(
        "blame who hung up although it spoke",
        "membership.cc",
        "(spoke_.count(r.peer) != 0 || was_silent(r.rank));",
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
        "beat.kind = Action::Kind::Heartbeat;\n    actions_.push_back(std::move(beat));",
        "beat.kind = Action::Kind::Heartbeat;",
    ),
    Mutation(
        "never notice silence",
        "membership.cc",
        "now - entry.heard_at < std::chrono::milliseconds(config_.dead_after_ms)",
        "now - entry.heard_at < std::chrono::hours(config_.dead_after_ms)",
    ),
    Mutation(
        "a goodbye does not count",
        "membership.cc",
        "    entry->left = true;\n  }\n}\n\nvoid Membership::controlClosed",
        "  }\n}\n\nvoid Membership::controlClosed",
    ),
    Mutation(
        "no deadlines",
        "data_plane_tick.cc",
        "    if (deadline.expired(now)) {\n      notice(timedOut(",
        "    if (false) {\n      notice(timedOut(",
    ),
    Mutation("held frames are not replayed", "data_plane.cc", "  replayHeld(running);\n", ""),
    Mutation(
        "operations end before the links stop",
        "data_plane.cc",
        "  stopPorts();\n  const auto oldest",
        "  const auto oldest",
    ),
    Mutation(
        "a broken link counts at once",
        "data_plane_links.cc",
        "Clock::now() + std::chrono::milliseconds(kSuspicionMs)",
        "Clock::now()",
    ),
    Mutation(
        "what waits for a connection leaves after the end",
        "data_plane_links.cc",
        "    unwatch(port->watched);\n    port->channel.clear();\n"
        "    port->broken = true;\n  }\n}\n\nvoid DataPlane::sayGoodbye",
        "  }\n}\n\nvoid DataPlane::sayGoodbye",
    ),
    Mutation(
        "a goodbye may be cut short",
        "data_plane_links.cc",
        "if (!port.says_goodbye || !(port.broken || port.channel.empty())) {",
        "if (!port.says_goodbye) {",
    ),
    Mutation(
        "a control goodbye does not wait for the bulk link",
        "data_plane_links.cc",
        "(transfer.needsFrom(peer) && port != nullptr && port->ended)",
        "transfer.needsFrom(peer)",
    ),
    Mutation(
        "staged bytes are not copied",
        "transfer.cc",
        "      if (state.staging) {\n        std::memcpy(",
        "      if (false) {\n        std::memcpy(",
    ),
    Mutation(
        "consumed before the frame has left",
        "transfer.cc",
        "    states_[index].staging.release();\n    consumed(index);\n  }\n  ended(index);",
        "    states_[index].staging.release();\n  }\n  ended(index);",
    ),
    Mutation(
        "an odd one out is not outvoted",
        "membership.cc",
        "return disagree ? blamed(a) > blamed(b) : precedes(a, b);",
        "return precedes(a, b);",
    ),
    Mutation(
        "a silent rank's own accusations count",
        "membership.cc",
        "return r.code == ErrorCode::PeerUnresponsive && r.peer == rank && r.rank != rank;",
        "return false;",
    ),
    Mutation(
        "who hears nobody blames a neighbour",
        "membership.cc",
        "if (others && !heard) {",
        "if (false) {",
    ),
    Mutation(
        "news counts although the choice is due",
        "membership.cc",
        "  if (now >= decide_at_) {\n    return;",
        "  if (false) {\n    return;",
    ),
    Mutation(
        "a rank that slept counts what it did not hear",
        "membership.cc",
        "        entry.heard_at = std::min(now, entry.heard_at + late);\n",
        "",
    ),
    Mutation(
        "a message counts each time it is heard",
        "point_to_point.cc",
        "  if (isPast(false, from, tag, index)) {\n    return;\n  }\n",
        "",
    ),
    Mutation(
        "operations that have ended are forgotten",
        "protocol.cc",
        "  keepRecent(op_id, found->second.descriptor);\n  ops_.erase(found);",
        "  ops_.erase(found);",
    ),
    Mutation(
        "a stuck rank does not ask everybody",
        "protocol.cc",
        "if (again || due(op.told_everyone, kAskEveryoneAfterMs)) {",
        "if (false) {",
    ),
    Mutation(
        "links end at once when a group has failed",
        "data_plane_links.cc",
        "    close_at_ = std::max(close_at_, failed_at_ + std::chrono::milliseconds(kNewsMs));\n",
        "",
    ),
    Mutation(
        "a goodbye ends a receive from any rank",
        "data_plane_messages.cc",
        "  return alone && !open && !unmatched_.empty();",
        "  return alone && !unmatched_.empty();",
    ),
    Mutation(
        "no deadline for a receive from any rank",
        "data_plane_tick.cc",
        "    if (deadline.expired(now)) {\n      notice(unmatched(*entry.second, identity_));",
        "    if (false) {\n      notice(unmatched(*entry.second, identity_));",
    ),
    Mutation(
        "used eager bytes stay in the pool",
        "protocol_flow.cc",
        "    pool.eager_in -= nbytes;\n",
        "",
    ),
]
GROUP_SEEDS = 2_000_000_000_000
"""kGroupSeeds of csrc/sim/plan.h."""


def build(copy: Path, folder: Path) -> Path | None:
    """Build pycomm_simulate of `copy`: the path of the program, or None if it does not compile."""
    if not (folder / "build.ninja").exists():
        configure = [
            "cmake",
            "-S",
            str(copy),
            "-B",
            str(folder),
            "-G",
            "Ninja",
            "-DPYCOMM_TESTS=ON",
        ]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    make = ["ninja", "-C", str(folder), "-j2", "pycomm_simulate"]
    done = subprocess.run(make, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout[-2000:], file=sys.stderr)
        return None
    return folder / "tests" / "cpp" / "pycomm_simulate"


def caught(program: Path, base: int, seeds: int) -> tuple[int, int, str]:
    """How many seeds fail, the first of them, and what it breaks; or what the program died of."""
    command = [str(program), "--seeds", f"{base + 1}:{base + seeds}", "--jobs", "2"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return -1, 0, "did not end"
    if done.returncode not in (0, 1):
        return -1, 0, f"died with {done.returncode}"
    total = re.search(r"^all +\d+ +\d+ +(\d+)$", done.stdout, re.MULTILINE)
    first = [int(seed) for seed in re.findall(r"^seed (\d+):", done.stdout, re.MULTILINE)]
    violation = re.search(r"VIOLATION: (.*)", done.stdout)
    return (
        int(total.group(1)) if total else -1,
        min(first, default=0),
        violation.group(1)[:90] if violation else "",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    parser.add_argument("--seeds", type=int, default=10000)
    parser.add_argument("--only", nargs="*", default=[], help="parts of mutations' names")
    options = parser.parse_args()
    copy, folder = options.work / "tree", options.work / "build"
    for part in ("csrc", "cmake", "tests/cpp"):
        shutil.copytree(ROOT / part, copy / part, dirs_exist_ok=True)
    shutil.copy(ROOT / "CMakeLists.txt", copy)
    survived = 0
    print("| mutation | one group | several | first | what it breaks |\n|---|---|---|---|---|")
    for mutation in [Mutation("none", "", "", ""), *MUTATIONS]:
        wanted = [part for part in options.only if part in mutation.name]
        if options.only and not wanted and mutation.name != "none":
            continue
        file = copy / "csrc" / "engine" / mutation.file
        source = file.read_text() if mutation.file else ""
        if mutation.file:
            if source.count(mutation.old) != 1:
                raise SystemExit(
                    f"{mutation.name}: its text stands {source.count(mutation.old)} times in {file}"
                )
            file.write_text(source.replace(mutation.old, mutation.new))
        program = build(copy, folder)
        if mutation.file:
            file.write_text(source)
        if program is None:
            print(f"| {mutation.name} | does not compile | | | |", flush=True)
            continue
        found = [caught(program, base, options.seeds) for base in (0, GROUP_SEEDS)]
        counts = [count if count >= 0 else "all" for count, _, _ in found]
        _, first, what = next((each for each in found if each[0]), (0, "", ""))
        survived += all(count == 0 for count in counts) == bool(mutation.file)
        print(
            f"| {mutation.name} | {counts[0]} | {counts[1]} | {first or ''} | {what} |", flush=True
        )
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
