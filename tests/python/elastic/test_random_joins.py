"""Random trainings in which members and newcomers die where members stop for newcomers.

A member dies before the next members are decided, or while they are; a newcomer while it loads; and
others come at any moment within ``quorum_wait``. So whatever the order is, enough processes are
there in time, and the training goes on: also if ``min_ranks`` is the number of its founders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import signal
import time
from pathlib import Path

import pytest
import rings
from elastic_joining import Plan
from ranks import Ranks
from test_joined_trainings import check, joining, start_with_faults

pytestmark = [
    pytest.mark.ci,
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.timeout(200),
    pytest.mark.usefixtures("fault_build"),
]

BEFORE = ("survive.finished:1", "survive.committed:1", "survive.give:1")
"""Points of a member before the next members are decided; the last one of rank 0."""
WHILE = (
    "survive.stop_giving:1",
    "survive.seal:1",
    "survive.sealed:1",
    "survive.keep:1",
    "survive.install:1",
    "survive.meet:1",
)
"""Points of a member while they are decided."""
QUORUM_WAIT_S = 30.0
LATEST_S = 2.0
STEPS_AFTER = 200
"""From the last one that has come to the end: more than a rank makes while the end is written."""


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    founders: int
    least: int
    """``min_ranks``."""
    victim: int
    """Of the founders."""
    point: str
    loses_newcomer: bool
    """The first process that joins dies, too, while it loads. The victim dies BEFORE then."""
    come_after_s: tuple[float, ...]
    """When the others come, after the first one; none: nobody comes in the place of the dead."""

    @property
    def alive(self) -> int:
        return self.founders - self.loses_newcomer + len(self.come_after_s)


def random_program(seed: int) -> Program:
    draw = random.Random(seed)
    founders = draw.choice([2, 2, 3, 4])
    victim = draw.randrange(founders)
    before = draw.random() < 0.6
    loses_newcomer = before and draw.random() < 0.5
    come = 0 if draw.random() < 0.2 else 1 + loses_newcomer
    return Program(
        seed,
        founders,
        max(1, founders - draw.choice([0, 0, 1])),
        victim,
        draw.choice((BEFORE if victim == 0 else BEFORE[:-1]) if before else WHILE),
        loses_newcomer,
        tuple(draw.uniform(0.0, LATEST_S) for _ in range(come)),
    )


def wait_for_end(running: Ranks, rank: int) -> None:
    give_up_s = time.monotonic() + 60.0
    while running.processes[rank].poll() is None:
        assert time.monotonic() < give_up_s, running.collect(1.0).describe()
        time.sleep(0.01)


def steps_of(running: Ranks, rank: int) -> int:
    return max(
        (int(mark.split()[1]) for mark in running.marks(rank) if mark.startswith("step ")),
        default=0,
    )


@pytest.mark.parametrize("seed", rings.first_of(range(60), 8))
def test_random_joins(seed: int, tmp_path: Path) -> None:
    program = random_program(seed)
    print(program)
    end = tmp_path / "end"
    goes_on = program.alive >= program.least
    plan = Plan(
        str(tmp_path / "peers"),
        10**6,
        payload=4 << 20,
        check=False,
        settings=(
            ("min_ranks", program.least),
            ("quorum_wait", QUORUM_WAIT_S if goes_on else 2.0),
        ),
        ends=str(end),
    )
    strike = (program.victim, f"{program.point}:kill")
    founders = dataclasses.replace(plan, struck=strike)
    if program.point in BEFORE:
        founders = dataclasses.replace(plan, struck_in_stop=strike)
    first = joining(plan)
    if program.loses_newcomer:
        first = dataclasses.replace(first, struck=(0, "survive.take:2:kill"))
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(
            start_with_faults(program.founders, tmp_path / "store", founders)
        )
        running.wait_for_mark(0, "step 10")
        newcomers = []
        began_s = time.monotonic()
        for number, after_s in enumerate((0.0, *sorted(program.come_after_s))):
            time.sleep(max(0.0, began_s + after_s - time.monotonic()))
            one = joining(plan) if number else first
            newcomers.append(
                stack.enter_context(start_with_faults(1, tmp_path / f"store{number}", one))
            )
        wait_for_end(running, program.victim)
        live = newcomers[program.loses_newcomer :]
        if program.loses_newcomer:
            wait_for_end(newcomers[0], 0)
        stay = [rank for rank in range(program.founders) if rank != program.victim]
        if goes_on:
            for newcomer in live:
                newcomer.wait_for_mark(0, "trains")
            last = max(steps_of(running, rank) for rank in stay)
            partial = end.with_suffix(".part")
            partial.write_text(str(last + STEPS_AFTER))
            partial.rename(end)
        ended = running.collect(60.0)
        assert ended[program.victim].exit_code == -signal.SIGKILL, ended.describe()
        if not goes_on:
            for rank in stay:
                error = ended[rank].value["error"]
                assert error.is_a("QuorumLostError"), error.text
                assert "too few ranks" in error.text, error.text
            return
        results = [ended[rank] for rank in stay]
        for newcomer in live:
            results += newcomer.collect(60.0)
    assert len(check(results)) == program.alive
