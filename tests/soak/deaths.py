"""Trainings with elastic= whose ranks die, leave, stop, are cut off and join: what is lost?

One program, two questions. A long training of 8 ranks, beside one that nothing is done to, in turn:

    python tests/soak/deaths.py --minutes 30 --faults 100

The same between 4 hosts, whose wires are cut, too (network namespaces, TCP; root):

    python tests/soak/deaths.py --minutes 30 --faults 100 --hosts 4

Or how long a killed rank takes the others, beside steps in which nobody dies:

    python tests/soak/deaths.py --kills 200 --model-mb 1 --ranks 4

The exit status is 1 if a step or a sample was lost or counted twice, if members had other bits, if
a rank ended as it should not, if descriptors, threads or memory grew, if the loss went elsewhere,
or if a fault took longer than it may.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import math
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "rig"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import report
from cluster import cluster
from death_costs import Cost, Ends, Fault, Stretch, Timed, costs_of
from death_faults import CUT, HEARTBEAT_S, KINDS, SPARED_FROM, Striker, planned
from death_training import Plan
from death_trainings import BrokenError, Training
from hosts import run
from ranks import TORCH_DDP
from zygote import MODULES, Zygote

QUORUM_WAIT_S = 5.0
RANKS = 8
TRAININGS = ("faults", "quiet")
STRETCH_S = 45.0
AIMS_S = {"SIGKILL": 0.5, "SIGTERM": 0.5, "SIGSTOP": HEARTBEAT_S + 0.5, CUT: HEARTBEAT_S + 0.5}
RSS_LIMIT_KB = 4096
LOSS_LIMIT = 0.05
ACCURACY_LIMIT = 0.02
POINTS = 8
STALL_S = 3.0
"""What one fault may take longer than its kind's aim, which is judged by the median."""
KILL_MS = 1000.0
"""p99 from a kill to the end of `backward()` on all who are left."""

# --- the long training ----------------------------------------------------------------------------


@dataclasses.dataclass
class Long:
    """What the long run was."""

    struck: Training
    quiet: Training
    faults: list[Fault]
    timed: tuple[Timed, Timed]
    """With faults, and without."""
    spared: Sequence[int]
    wanted: int


def long_run(options: argparse.Namespace, struck: Training, quiet: Training, cut: Any) -> Long:
    """Both trainings in turn; never both at once."""
    dice = random.Random(options.seed)
    kinds = planned(options.faults, dice, cuts=cut is not None, only=options.only)
    pairs = max(1, round(options.minutes * 60 / 2 / STRETCH_S))
    length_s = options.minutes * 60 / 2 / pairs
    latest_s = time.monotonic() + 1.5 * options.minutes * 60 + 60
    striker = Striker(struck, dice, cut)
    timed = (Timed(struck.accounts), Timed(quiet.accounts))
    for training in (struck, quiet):
        training.found()
        training.gate.set(goes=True)
        training.wait_for_steps(30)
        training.gate.set(goes=False)
    done = 0
    for pair in range(pairs):
        begin_s = resume(struck)
        share = kinds[len(kinds) * pair // pairs : len(kinds) * (pair + 1) // pairs]
        for number, kind in enumerate(share):
            if time.monotonic() > latest_s:
                break
            if done >= SPARED_FROM * len(kinds) and not striker.spared:
                striker.spared = struck.members[:2]
            due_s = begin_s + length_s * (number + dice.random()) / (len(share) + 0.5)
            struck.wait(lambda due_s=due_s: time.monotonic() >= due_s, length_s + 1, "")  # type: ignore[misc]
            striker.strike(kind, pair)
            done += 1
        rest_s = max(0.0, begin_s + length_s - time.monotonic())
        if rest_s > 0:
            sit(struck, rest_s)
        timed[0].stretches.append(hold(struck, begin_s))
        begin_s = resume(quiet)
        sit(quiet, timed[0].stretches[-1].end_s - timed[0].stretches[-1].begin_s)
        timed[1].stretches.append(hold(quiet, begin_s))
        print(
            f"# {pair + 1} of {pairs}: {done} faults, step {struck.step} and {quiet.step}, "
            f"{len(struck.accounts.faults) + len(quiet.accounts.faults)} complaints",
            file=sys.stderr,
            flush=True,
        )
    for training in (struck, quiet):
        training.end()
    return Long(struck, quiet, striker.faults, timed, striker.spared, len(kinds))


def sit(training: Training, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    training.wait(lambda: time.monotonic() >= until_s, seconds + 30, "")


def resume(training: Training) -> float:
    """Lets it go on, and returns when its first step has ended: from then on it is timed."""
    training.gate.set(goes=True)
    training.wait_for_steps(3)
    return training.accounts.steps[training.step].ended_s


def hold(training: Training, begin_s: float) -> Stretch:
    training.accounts.read()
    end_s = training.accounts.steps[training.step].ended_s
    training.gate.set(goes=False)
    time.sleep(0.3)
    training.accounts.read()
    return Stretch(begin_s, end_s)


# --- tables ---------------------------------------------------------------------------------------


def long_table(run_: Long) -> tuple[list[str], list[str]]:
    """Lines, and what is broken."""
    broken: list[str] = []
    lines: list[str] = []
    for name, training in (("with faults", run_.struck), ("without", run_.quiet)):
        accounts = training.accounts
        lost_steps, lost_samples = accounts.lost_steps(), accounts.lost_samples()
        epochs = max(step.epoch for step in accounts.steps.values())
        writers = sum(rank.steps for rank in accounts.ranks)
        lines.append(
            f"{name}: {accounts.newest + 1} steps, {lost_steps} lost; {epochs} epochs, "
            f"{lost_samples} samples lost, {accounts.doubled} doubled; bits compared "
            f"{writers} times on {len(accounts.ranks)} processes; {len(accounts.faults)} complaints"
        )
        broken += [f"{name}: {each}" for each in accounts.faults]
    ends = collections.Counter(rank.ended or "SIGKILL" for rank in run_.struck.accounts.ranks)
    lines.append(
        "processes ended by: " + ", ".join(f"{n} {how}" for how, n in sorted(ends.items()))
    )
    lines += kept_lines(run_)
    more, slow = kind_lines(run_)
    lines += more
    more, elsewhere = curve_lines(run_)
    lines += more
    more, grown = flat_lines(run_)
    return [*lines, *more], [*broken, *slow, *elsewhere, *grown]


def kept_lines(run_: Long) -> list[str]:
    struck, quiet = run_.timed
    rates = (struck.rate(), quiet.rate())
    pairs = sorted(struck.rate(n) / quiet.rate(n) for n in range(len(struck.stretches)))
    seconds = sum(each.end_s - each.begin_s for each in struck.stretches)
    return [
        f"samples per second: {rates[0]:.0f} with {len(run_.faults)} faults of {run_.wanted} in "
        f"{seconds:.0f} s, {rates[1]:.0f} without: {rates[0] / rates[1]:.1%} kept; "
        f"{len(pairs)} pairs of stretches: {pairs[0]:.1%} to {pairs[-1]:.1%}, "
        f"median {statistics.median(pairs):.1%}"
    ]


def kind_lines(run_: Long) -> tuple[list[str], list[str]]:
    lines = [
        f"{'':<16} {'':>6} {'they go on':>15} {'lost by it':>15} {'newcomers stop':>15} "
        f"{'are members':>15} {'lost in all':>11} {'kept':>6}",
        f"{'kind':<16} {'faults':>6} {'p50 s':>7} {'max s':>7} {'p50 s':>7} {'max s':>7} "
        f"{'p50 s':>7} {'max s':>7} {'p50 s':>7} {'max s':>7} {'mean s':>11} {'':>6}  aim",
    ]
    slow = []
    costs: list[Cost] = costs_of(run_.faults, *run_.timed)
    for kind in (*KINDS, CUT):
        mine = [each for each in costs if each.kind == kind]
        if not mine:
            continue
        columns = [
            [getattr(c, name) for c in mine] for name in ("goes_on", "lost", "stop", "whole")
        ]
        cells = " ".join(f"{statistics.median(c):>7.3f} {max(c):>7.3f}" for c in columns)
        kept = 1 - sum(c.debt for c in mine) / sum(c.window for c in mine)
        aim, is_ = AIMS_S[kind.partition(",")[0]], statistics.median(columns[1])
        lines.append(
            f"{kind:<16} {len(mine):>6} {cells} {statistics.mean(c.debt for c in mine):>11.3f} "
            f"{kept:>6.1%}  {aim:g} s {'met' if is_ <= aim else 'MISSED'}"
        )
        if is_ > aim:
            slow.append(f"{kind}: {is_:.3f} s are lost by it (p50), more than {aim:g} s")
        if max(columns[1]) > aim + STALL_S:
            slow.append(
                f"{kind}: {max(columns[1]):.3f} s are lost by one, more than {aim + STALL_S:g} s"
            )
    if len(run_.faults) < run_.wanted:
        slow.append(f"{len(run_.faults)} of {run_.wanted} faults came in the time that there was")
    return lines, slow


def curve_lines(run_: Long) -> tuple[list[str], list[str]]:
    trainings = (run_.struck, run_.quiet)
    most = min(sum(s.samples for s in t.accounts.steps.values()) for t in trainings)
    points = [most * (number + 1) // POINTS for number in range(POINTS)]
    curves = [each.accounts.curve(points) for each in trainings]
    accuracies = [
        next(r.accuracy for r in each.accounts.ranks if r.ended == "end") or 0.0
        for each in trainings
    ]
    lines = ["samples     " + " ".join(f"{each:>9}" for each in points)]
    for name, curve, accuracy in zip(("with faults", "without"), curves, accuracies, strict=True):
        cells = " ".join(f"{each:>9.4f}" for each in curve)
        lines.append(f"{name:<12}{cells}  accuracy {accuracy:.1%}")
    apart = max(abs(a - b) for a, b in zip(*curves, strict=True))
    lines.append(f"loss: at most {apart:.4f} apart")
    broken = []
    if not apart <= LOSS_LIMIT:
        broken.append(f"losses are {apart:.4f} apart, more than {LOSS_LIMIT}")
    if abs(accuracies[0] - accuracies[1]) > ACCURACY_LIMIT:
        broken.append(f"accuracies differ: {accuracies}")
    return lines, broken


def flat_lines(run_: Long) -> tuple[list[str], list[str]]:
    """What ranks hold that lived through many faults: the second quarter by the last one."""
    lines, broken = [], []
    for member in run_.spared:
        rank = next(each for each in run_.struck.accounts.ranks if each.member == member)
        since_s = next(f.at_s for n, f in enumerate(run_.faults) if n >= SPARED_FROM * run_.wanted)
        looks = [kept for at_s, kept in rank.looks if at_s >= since_s]
        lived = sum(fault.at_s >= since_s for fault in run_.faults)
        quarter = max(1, len(looks) // 4)
        early, late = looks[quarter : 2 * quarter], looks[-quarter:]
        cells = []
        for index, (name, limit) in enumerate(
            (("descriptors", 0), ("threads", 0), ("resident KB", RSS_LIMIT_KB))
        ):
            before, after = (
                round(statistics.median(each[index] for each in part)) for part in (early, late)
            )
            cells.append(f"{name} {before} to {after}")
            if after - before > limit:
                broken.append(f"member {member}: {name} grew from {before} to {after}")
        lines.append(f"member {member}, {lived} faults, {len(looks)} looks: " + ", ".join(cells))
    if not lines and run_.wanted >= POINTS:
        broken.append("no member lived long enough to see whether anything grows")
    return lines, broken


def kill_run(options: argparse.Namespace, training: Training) -> tuple[list[str], list[str]]:
    """One kill after the other, and as many moments without."""
    dice = random.Random(options.seed)
    training.found()
    training.gate.set(goes=True)
    training.wait_for_steps(6)
    striker = Striker(training, dice, steps_after=3)
    moments: list[float] = []
    for number in range(options.kills):
        sit(training, dice.uniform(0.1, 0.3))
        moments.append(time.monotonic())
        sit(training, dice.uniform(0.1, 0.3))
        training.wait_for_steps(1)
        sit(training, dice.uniform(0.0, 0.1))
        striker.strike("SIGKILL", 0)
        if number % 20 == 19:
            print(f"# {number + 1} kills, step {training.step}", file=sys.stderr, flush=True)
    training.end()
    accounts, ends = training.accounts, Ends(training.accounts)
    lost_steps, lost_samples = accounts.lost_steps(), accounts.lost_samples()
    windows = [(f.at_s, ends.end_of(f.over_step)) for f in striker.faults]
    quiet = []
    for (_, a), (b, _) in itertools.pairwise(windows):
        quiet += ends.spans(a, b)
    alone = [ends.end_of(ends.last_before(at)[0] + 1) - at for at in moments]
    killed = [ends.end_of(f.gone_step) - f.at_s for f in striker.faults]
    stops = [
        max(ends.spans(f.come_s, ends.end_of(f.over_step)), default=0.0) for f in striker.faults
    ]
    lines = [f"{'':<62} {'number':>6} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}"]
    for name, values in (
        ("SIGKILL to the end of backward() without the rank, on all", killed),
        ("any moment to the end of the step's backward(), on all", alone),
        ("a whole step", quiet),
        ("the longest step as a newcomer comes", stops),
    ):
        lines.append(f"{name:<62} {len(values):>6} " + " ".join(f"{v:>8.1f}" for v in of(values)))
    lines.append(
        f"{accounts.newest + 1} steps, {lost_steps} lost; {lost_samples} samples lost, "
        f"{accounts.doubled} doubled; {len(accounts.faults)} complaints"
    )
    broken = list(accounts.faults)
    if (slowest := of(killed)[1]) > KILL_MS:
        broken.append(f"p99 of a kill is {slowest:.0f} ms, more than {KILL_MS:g} ms")
    return lines, broken


def of(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum, in milliseconds."""
    ordered = sorted(1000 * each for each in seconds)
    return (
        statistics.median(ordered),
        ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        ordered[-1],
    )


# --- the program ----------------------------------------------------------------------------------


@contextlib.contextmanager
def hosts_of(count: int) -> Iterator[tuple[dict[str, list[Zygote]], Any]]:
    """By training the processes that ranks are forked from, one per host; and what cuts the wire
    of one of the first training's hosts. Each training has hosts of its own.
    """
    modules = (*MODULES, *TORCH_DDP)
    with contextlib.ExitStack() as stack:
        if count == 1:
            zygote = Zygote(modules)
            stack.callback(zygote.close)
            yield {name: [zygote] for name in TRAININGS}, None
            return
        made = stack.enter_context(cluster(count * len(TRAININGS)))
        zygotes = []
        for node in made.nodes:
            zygotes.append(Zygote(modules, node.machine()))
            stack.callback(zygotes[-1].close)

        def cut(host: int, is_cut: bool) -> None:
            port = f"port-{made.nodes[host].name}"
            state = "down" if is_cut else "up"
            run("ip", "-n", made.switch.namespace, "link", "set", port, state)

        yield {TRAININGS[0]: zygotes[:count], TRAININGS[1]: zygotes[count:]}, cut


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[str], list[str]]:
    group: dict[str, Any] = {"heartbeat_timeout": HEARTBEAT_S}
    if options.hosts > 1:
        group |= {"transport": "tcp", "interface": "eth0"}
    plan = Plan(
        folder="",
        name="",
        global_batch=32 * options.ranks,
        equal_parts=options.ranks,
        pause_s=options.pause_ms / 1000,
        hidden=hidden_of(options.model_mb),
        seed=options.seed,
        quorum_wait_s=QUORUM_WAIT_S,
    )
    with contextlib.ExitStack() as stack:
        zygotes, cut = stack.enter_context(hosts_of(options.hosts))

        def training(name: str) -> Training:
            made = Training(folder / name, zygotes[name], plan, options.ranks, group)
            stack.callback(made.close)
            return made

        struck, quiet = TRAININGS
        if options.kills:
            return kill_run(options, training(struck))
        return long_table(long_run(options, training(struck), training(quiet), cut))


def hidden_of(megabytes: float) -> int:
    """The width of the middle layer with which the model has so many."""
    return max(64, round(math.sqrt(megabytes * 2**18 + 37.5**2) - 37.5))


def run_and_report(
    name: str,
    argv: Sequence[str],
    options: argparse.Namespace,
    measures: Callable[[argparse.Namespace, Path], tuple[list[str], list[str]]],
) -> int:
    """Prints the table of a program of this folder, and what is broken; the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    facts = report.header(name, argv)
    facts["command"] = " ".join(["python", f"tests/soak/{name}.py", *argv])
    folder = Path(tempfile.mkdtemp(prefix=f"pycomm-{name}-"))
    try:
        lines, broken = measures(options, folder)
    except BrokenError as error:
        lines, broken = [], [str(error)]
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder)
        raise
    facts["load_at_end"] = round(os.getloadavg()[0], 2)
    text = [f"{name}: {value}" for name, value in facts.items()]
    text += [*lines, *(f"BROKEN: {each}" for each in broken[:10])]
    text.append(f"{len(broken)} things are broken" if broken else "nothing is broken")
    print("\n".join(text), flush=True)
    if broken:
        print(f"notes are in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    if options.out is not None:
        options.out.write_text("\n".join(text) + "\n")
    return 1 if broken else 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=2.0, help="of both trainings together")
    parser.add_argument("--faults", type=int, default=7)
    parser.add_argument("--only", choices=(*KINDS, CUT), help="no other kind of fault")
    parser.add_argument("--kills", type=int, default=0, help="the other question")
    parser.add_argument("--model-mb", type=float, default=0.0, help="of parameters")
    parser.add_argument("--ranks", type=int, default=None, help="8; with --kills 4")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--pause-ms", type=float, default=None, help="of a step: 20; or 2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args(argv)
    if options.ranks is None:
        options.ranks = 4 if options.kills else RANKS
    if options.pause_ms is None:
        options.pause_ms = 2.0 if options.kills else 20.0
    return run_and_report("deaths", argv, options, measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
