"""What a process that joins costs the members of a training with a large state, over a gigabit.

    python tests/soak/joins.py --model-mb 250 --joins 5

Root: three hosts with a member each, and a fourth one, on which a process joins, trains a few steps
and leaves in order, again and again. Hosts are network namespaces behind links of a gigabit. Adam
keeps two tensors per parameter, so with 250 MB of parameters the state has 750 MB.

The exit status is 1 if a step or a sample was lost, if members had other bits, if a process ended
as it should not, or if members' steps took longer than they may while links are made.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rig"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from cluster import cluster
from death_accounts import Rank
from death_costs import Ends
from death_training import Plan
from death_trainings import Training
from deaths import hidden_of, run_and_report
from ranks import TORCH_DDP
from zygote import MODULES, Zygote

MEMBERS = 3
SLOWER = 1.1
"""What steps may take while links are made, by those before."""
GIGABIT_MB_S = 125.0
_LIMIT_S = 300.0


@dataclasses.dataclass
class Joined:
    """A process that has joined, and left."""

    rank: Rank
    quiet_s: float
    """From then on nobody else had come, left or asked."""
    started_s: float


def join(training: Training, steps: int) -> Joined:
    quiet_s = training.accounts.steps[training.step].ended_s
    training.wait_for_steps(steps, _LIMIT_S)
    started_s = time.monotonic()
    newcomer = training.add(MEMBERS)
    training.wait(lambda: len(training.members) > MEMBERS, _LIMIT_S, "for the newcomer")
    training.wait_for_steps(steps, _LIMIT_S)
    training.strike(newcomer, signal.SIGTERM, ["left"])
    training.wait_for_end(newcomer)
    training.wait(lambda: len(training.members) == MEMBERS, _LIMIT_S, "for its end")
    training.wait_for_steps(1, _LIMIT_S)
    return Joined(newcomer.rank, quiet_s, started_s)


def table(training: Training, joins: Sequence[Joined], state_mb: float) -> list[str]:
    """Lines; the last one begins with "slower" if members' steps took too long."""
    ends, steps = Ends(training.accounts), training.accounts.steps
    before, starting, linking, stops, together, asking = ([] for _ in range(6))
    for each in joins:
        rank = each.rank
        first = min(number for number, step in steps.items() if rank.member in step.members)
        stopped_s = steps[first - 1].ended_s
        began_s = ends.last_before(rank.asked_s)[1]
        before += ends.spans(each.quiet_s, each.started_s)
        starting += ends.spans(ends.last_before(each.started_s)[1], began_s)
        linking += ends.spans(began_s, stopped_s)
        stops += ends.spans(stopped_s, steps[first].ended_s)
        together += ends.spans(steps[first].ended_s, rank.struck_s)
        asking.append(rank.began_s - rank.asked_s)
    usual, four = statistics.median(before), statistics.median(together or before)
    rows = {
        "steps of the members before": before,
        "... as the process makes its model": starting,
        "... while links are made": linking,
        "... and of all with it": together,
        "the step in which it comes": stops,
        "of that, the members' stop": [took - four for took in stops],
        "the process, from asking until it has the state": asking,
    }
    lines = [f"{'':<48} {'number':>6} {'p50 s':>8} {'max s':>8}"]
    for name, values in rows.items():
        cells = f"{statistics.median(values):>8.3f} {max(values):>8.3f}" if values else ""
        lines.append(f"{name:<48} {len(values):>6} {cells}")
    lines.append(f"a gigabit carries {state_mb:g} MB in {state_mb / GIGABIT_MB_S:.3f} s at best")
    if linking:
        ratio = statistics.median(linking) / usual
        lines.append(
            f"{'slower' if ratio > SLOWER else 'as they may be'}: steps take {ratio:.2f} times "
            f"as long while links are made, at most {SLOWER:g} is wanted"
        )
    return lines


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[str], list[str]]:
    """Lines, and what is broken."""
    plan = Plan(
        folder="",
        name="",
        global_batch=32 * MEMBERS,
        equal_parts=MEMBERS,
        pause_s=options.pause_ms / 1000,
        hidden=hidden_of(options.model_mb),
        join_pause_s=options.join_pause,
    )
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(cluster(MEMBERS + 1))
        zygotes = [Zygote((*MODULES, *TORCH_DDP), node.machine()) for node in made.nodes]
        for each in zygotes:
            stack.callback(each.close)
        group = {"transport": "tcp", "interface": "eth0"}
        training = Training(folder / "training", zygotes, plan, MEMBERS, group)
        stack.callback(training.close)
        training.found()
        training.gate.set(goes=True)
        training.wait_for_steps(3, _LIMIT_S)
        joins = []
        for number in range(options.joins):
            joins.append(join(training, options.steps))
            print(f"# {number + 1} joins, step {training.step}", file=sys.stderr, flush=True)
        training.end()
        accounts = training.accounts
        lost_steps, lost_samples = accounts.lost_steps(), accounts.lost_samples()
        lines = table(training, joins, 3 * options.model_mb)
        broken = [*accounts.faults, *(each for each in lines[-1:] if each.startswith("slower"))]
        lines.append(
            f"{accounts.newest + 1} steps, {lost_steps} lost; {lost_samples} samples lost, "
            f"{accounts.doubled} doubled; {len(accounts.faults)} complaints"
        )
        return lines, broken


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--model-mb", type=float, default=250.0, help="of parameters")
    parser.add_argument("--joins", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="before each join, and with it")
    parser.add_argument("--pause-ms", type=float, default=20.0, help="of a step")
    parser.add_argument("--join-pause", type=float, default=60.0, help="Elastic's, in seconds")
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args(argv)
    return run_and_report("joins", argv, options, measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
