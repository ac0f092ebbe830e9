"""Random faults on several hosts: a seed draws hosts, ranks, faults and moments.

An oracle of its own says who may go on: the hosts that reach each other, and how many votes their
ranks have. It knows nothing of messages. ``test_a_seed[7]`` runs seed 7 alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import rings
from elastic_hosts import SILENCE_S, Hosts, Training, alone, both, check, elastic_hosts, training

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.namespaces,
    pytest.mark.ci,
    pytest.mark.timeout(300),
]

QUORUM_WAIT_S = 4.0
SETTLED_S = QUORUM_WAIT_S + 25.0
KINDS = ("kill", "power", "cut", "pair", "one way", "blink", "stop", "pause", "leave")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with elastic_hosts(4) as made:
        yield made


@dataclasses.dataclass
class World:
    """What the faults have done so far."""

    run: Training
    draw: random.Random
    members: list[int]
    closed: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    """Ways between hosts on which nothing passes."""
    killed: set[int] = dataclasses.field(default_factory=set)
    left: set[int] = dataclasses.field(default_factory=set)
    stopped: set[int] = dataclasses.field(default_factory=set)

    def host(self, rank: int) -> int:
        return self.run.placed[rank]

    def reach(self, a: int, b: int) -> bool:
        ways = {(self.host(a), self.host(b)), (self.host(b), self.host(a))}
        return not ways & self.closed and not {a, b} & (self.killed | self.stopped)

    def may_go_on(self, side: Sequence[int]) -> bool:
        """More than half of the votes: two each, and one more of the first member's."""
        hosts = {self.host(rank) for rank in side}
        base = [rank for rank in self.members
                if not (rank in self.killed and self.host(rank) in hosts)]  # fmt: skip
        votes = sum(2 + (rank == self.members[0]) for rank in side)
        return 2 * votes > sum(2 + (rank == self.members[0]) for rank in base)

    def sides(self) -> list[list[int]] | None:
        """The members that reach each other; None if some reach others that do not."""
        found: list[list[int]] = []
        for rank in self.members:
            if rank in self.killed | self.stopped:
                continue
            side = [each for each in self.members if each == rank or self.reach(rank, each)]
            if side not in found:
                found.append(side)
        everyone = list(itertools.chain(*found))
        return found if len(everyone) == len(set(everyone)) else None

    def running(self) -> list[int]:
        """Members whose processes have not ended."""
        processes = self.run.running.processes
        return [rank for rank in self.members if processes[rank].poll() is None]


def strike(world: World, kind: str) -> str:
    """One fault, in words."""
    run, draw = world.run, world.draw
    rank = draw.choice(world.members)
    host, count = world.host(rank), len(run.hosts.nodes)
    other = draw.choice([each for each in set(run.placed) if each != host])
    for_s = 0.0
    if kind == "kill":
        run.signal([rank])
        world.killed.add(rank)
    elif kind == "power":
        world.closed |= set(alone(host, count))
        run.hosts.cut(*world.closed)
        run.signal(there := [each for each in run.on(host) if each in world.members])
        world.killed |= set(there)
    elif kind in ("cut", "pair", "one way", "blink"):
        pairs = both((host, other)) if kind == "pair" else alone(host, count)
        ways = set(pairs[:1] if kind == "one way" else pairs)
        run.hosts.cut(*world.closed | ways)
        if kind == "blink":
            time.sleep(for_s := draw.uniform(0.05, 0.6))
            run.hosts.cut(*world.closed)
        else:
            world.closed |= ways
    elif kind in ("stop", "pause"):
        run.signal([rank], signal.SIGSTOP)
        if kind == "pause":
            time.sleep(for_s := draw.uniform(0.05, 0.6))
            run.signal([rank], signal.SIGCONT)
        else:
            world.stopped.add(rank)
    elif len(world.members) > 1:
        run.ask_to_leave(rank)
        world.left.add(rank)
    return f"{kind}: rank {rank} on host {host}, other host {other}, {for_s:.2f} s"


def settle(world: World, told: str) -> None:
    """Until each process that is not stopped has ended, or has made steps for long enough."""
    run, began_s = world.run, time.monotonic()

    def done(rank: int) -> bool:
        process = run.running.processes[rank]
        notes = run.notes(rank)
        lately = len(notes) > 0 and notes[-1].at_s > began_s + 1.5 * SILENCE_S
        without = not set(notes[-1].members) & (world.killed | world.stopped) if notes else False
        return process.poll() is not None or (lately and without)

    for rank in world.running():
        if rank not in world.stopped:
            what = f"rank {rank} goes on or ends after {told}"
            run.wait_until(lambda rank=rank: done(rank), what, SETTLED_S)


@pytest.mark.parametrize("seed", rings.first_of(range(20)))
def test_a_seed(seed: int, hosts: Hosts, tmp_path: Path) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 4)
    placed = sorted([*range(1, count + 1), *(draw.randint(1, count) for _ in range(2))])
    while len(placed) > 5 or any(placed.count(host) > 2 for host in placed):
        placed.remove(max(placed, key=placed.count))
    print(f"seed {seed}: ranks on hosts {placed}")
    with training(hosts, placed, tmp_path, quorum_wait=QUORUM_WAIT_S) as run:
        world = World(run, draw, list(range(len(placed))))
        run.reach(10)
        for _ in range(draw.randint(1, 3)):
            if len(world.members) < 2:
                break
            time.sleep(draw.uniform(0.0, 0.3))
            began_s = time.monotonic()
            told = [strike(world, draw.choice(KINDS))]
            overlaps = draw.random() < 0.3
            if overlaps:
                time.sleep(draw.uniform(0.0, 1.5))
                told.append(strike(world, draw.choice(KINDS)))
            settle(world, "; ".join(told))
            alive = [rank for rank in world.running() if rank not in world.stopped]
            firsts = [
                note.at_s - began_s
                for rank in alive
                for notes in [run.notes(rank)]  # read once: there are thousands
                for note in notes
                if note.members == notes[-1].members
            ]
            print(f"{told}: {alive} after {max(min(firsts, default=0.0), 0.0):.2f} s")
            sides = None if overlaps else world.sides()
            if sides is not None:
                may = [side for side in sides if world.may_go_on(side)]
                expected = [rank for rank in (may[0] if may else []) if rank not in world.left]
                assert alive == expected, (told, sides, run.running.collect(0.0).describe())
            for rank in alive:
                assert set(run.notes(rank)[-1].members) >= set(alive), told
            run.signal(world.stopped & set(world.running()), signal.SIGCONT) if world.stopped else 0
            run.ended([rank for rank in world.stopped if rank not in world.killed],
                      since=began_s)  # fmt: skip
            world.stopped.clear()
            world.members = alive
            if world.closed and draw.random() < 0.5:
                world.closed.clear()
                run.hosts.heal()
        hosts.heal()
        results = run.stop()
    goes_on = world.members
    behind = set(range(len(placed))) - set(goes_on) - world.killed - world.left
    check(run, results, goes_on, killed=world.killed, left=world.left,
          behind=dict.fromkeys(behind, "LeftBehindError|QuorumLostError"))  # fmt: skip
