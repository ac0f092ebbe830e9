"""Elastic trainings on several hosts, what happens to them, and what their steps must be.

A host is a network namespace on a switch with a pid namespace of its own. Each rank writes down
every step as it is committed, so the steps of a rank that is killed are known, too.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from cluster import Cluster, Node, cluster
from elastic_rig import Net
from elastic_training import TOLERANCES, Plan, exact, hash_of, loss_of
from rank_child import RankError, describe_exception
from ranks import RankResults, Ranks, start_ranks
from zygote import MODULES, Zygote

import pycomm

SILENCE_S = 3.0
"""``heartbeat_timeout`` of all of these trainings: a loaded machine keeps no process so long."""
PATIENCE_S = 90.0
_MOST_STEPS = 20_000
_ports = itertools.count(29500)

# ---- in a rank


@dataclasses.dataclass(frozen=True)
class Course:
    """How a rank trains, until the file ``stop`` is in the folder."""

    folder: str
    plan: Plan


@dataclasses.dataclass(frozen=True)
class Note:
    """A step that a rank has committed."""

    step: int
    members: tuple[int, ...]
    bits: str
    """Of the parameters, buffers and gradients."""
    off: float
    """How far the worst gradient is from the float64 sum, by the largest gradient."""
    at_s: float
    files: int
    """Open descriptors."""


def trains_until_told(rank: int, world_size: int, course: Course) -> dict[str, Any]:
    """Trains, writes notes, and returns how it ended."""
    folder, plan = Path(course.folder), course.plan
    model = pycomm.DistributedDataParallel(
        Net(),
        wire_dtype=plan.wire,
        bucket_cap_mb=0.02,
        elastic=pycomm.Elastic(**dict(plan.settings)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    error: RankError | None = None
    with (folder / f"{rank}.notes").open("ab", buffering=0) as notes:
        try:
            for step in range(_MOST_STEPS):
                if (folder / f"leave-{rank}").exists():
                    model.elastic.leave()
                optimizer.zero_grad()
                before = copy.deepcopy(model.module)
                loss_of(model, plan, rank, step, 0).backward()
                assert model.elastic.step == step + 1
                note = _note(model, before, plan, step)
                notes.write(json.dumps(dataclasses.asdict(note)).encode() + b"\n")
                optimizer.step()
                if model.elastic.left or model.elastic.mean(float((folder / "stop").exists())) > 0:
                    break
        except Exception as caught:
            error = describe_exception(caught)
    return {"error": error, "stats": dataclasses.asdict(model.stats())}


def _note(model: Any, before: Net, plan: Plan, step: int) -> Note:
    members = model.elastic.members
    at_s = time.monotonic()
    expected = exact(before, plan, members, step)
    largest = max(float(each.abs().max()) for each in expected.values())
    grads = {name: each.grad for name, each in model.module.named_parameters()}
    off = max(float((grads[name] - expected[name]).abs().max()) / largest for name in expected)
    bits = hash_of((*model.parameters(), *model.buffers(), *grads.values()))
    return Note(step, members, bits, off, at_s, len(os.listdir("/proc/self/fd")))


# ---- in the test


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Several hosts, each with a process from which its ranks are forked."""

    made: Cluster
    zygotes: Mapping[str, Zygote]

    @property
    def nodes(self) -> Sequence[Node]:
        """node1, node2 ..."""
        return self.made.nodes

    def cut(self, *ways: tuple[int, int]) -> None:
        """From now on nothing gets from the first host to the second (1, 2 ...), of each pair."""
        self.made.drop(*((self.nodes[a - 1], self.nodes[b - 1]) for a, b in ways))

    def heal(self) -> None:
        """All wires are whole."""
        self.made.drop()


def both(*pairs: tuple[int, int]) -> list[tuple[int, int]]:
    """Both directions between the hosts of each pair."""
    return [way for a, b in pairs for way in ((a, b), (b, a))]


def alone(host: int, count: int) -> list[tuple[int, int]]:
    """Both directions between that host and all others."""
    return both(*((host, other) for other in range(1, count + 1) if other != host))


@contextlib.contextmanager
def elastic_hosts(count: int) -> Iterator[Hosts]:
    """So many hosts, until the block ends; skips the test where they cannot be made."""
    with cluster(count) as made, contextlib.ExitStack() as stack:
        zygotes = {}
        for node in made.nodes:
            zygotes[node.name] = Zygote(MODULES, node.machine())
            stack.callback(zygotes[node.name].close)
        yield Hosts(made, zygotes)


def notes_in(folder: Path, rank: int) -> list[Note]:
    """The steps that this rank has committed so far."""
    try:
        *lines, _ = (folder / f"{rank}.notes").read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    notes = [Note(**json.loads(line)) for line in lines]
    return [dataclasses.replace(note, members=tuple(note.members)) for note in notes]


def last_notes(folder: Path, rank: int, members: Sequence[int]) -> list[Note]:
    """Those with these members."""
    return [note for note in notes_in(folder, rank) if note.members == tuple(members)]


class Training:
    """A training that runs."""

    def __init__(self, hosts: Hosts, running: Ranks, placed: Sequence[int], course: Course) -> None:
        self.hosts = hosts
        self.running = running
        self.placed = placed
        """By rank: its host."""
        self.course = course
        self._folder = Path(course.folder)

    def on(self, host: int) -> list[int]:
        """The ranks of a host."""
        return [rank for rank, there in enumerate(self.placed) if there == host]

    def notes(self, rank: int) -> list[Note]:
        """The steps that this rank has committed so far."""
        return notes_in(self._folder, rank)

    def wait_until(self, is_so: Callable[[], bool], what: str, limit_s: float = PATIENCE_S) -> None:
        """AssertionError, with all that is known, if that does not come."""
        deadline = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > deadline:
                steps = {rank: self.notes(rank)[-1:] for rank in range(len(self.placed))}
                text = self.running.collect(0.0).describe()
                raise AssertionError(f"not within {limit_s} s: {what}; {steps}\n{text}")
            time.sleep(0.02)

    def reach(self, step: int, ranks: Collection[int] | None = None) -> None:
        """Waits until these ranks, by default all, have committed so many steps."""
        for rank in range(len(self.placed)) if ranks is None else ranks:
            what = f"rank {rank} has committed {step} steps"
            self.wait_until(lambda rank=rank: len(self.notes(rank)) >= step, what)

    def go_on(self, ranks: Collection[int], *, since: float, steps: int = 5) -> float:
        """Waits until these have gone on without all others, for so many steps. The seconds from
        ``since`` until all of them had committed the first."""

        def first(rank: int) -> list[Note]:
            return last_notes(self._folder, rank, ranks)

        for rank in ranks:
            what = f"rank {rank} goes on with {ranks}"
            self.wait_until(lambda rank=rank: len(first(rank)) >= steps, what)
        return max(first(rank)[0].at_s for rank in ranks) - since

    def ended(self, ranks: Collection[int], *, since: float) -> float:
        """Waits until these processes have ended. The seconds since then."""
        for rank in ranks:
            process = self.running.processes[rank]
            what = f"rank {rank} ends"
            self.wait_until(lambda process=process: process.poll() is not None, what)
        return time.monotonic() - since

    def signal(self, ranks: Collection[int], number: int = signal.SIGKILL) -> float:
        """Sends a signal to ranks; when."""
        return min([self.running.kill(rank, number) for rank in ranks])

    def loses_power(self, host: int) -> float:
        """Nothing of that host's ends gets out: its wire is cut first. When."""
        at_s = time.monotonic()
        self.hosts.cut(*alone(host, len(self.hosts.nodes)))
        self.signal(self.on(host))
        return at_s

    def ask_to_leave(self, rank: int) -> float:
        """This rank will call ``leave()``."""
        (self._folder / f"leave-{rank}").touch()
        return time.monotonic()

    def stop(self, limit_s: float = PATIENCE_S) -> RankResults:
        """All who train end, at one step; the results, when all have ended."""
        (self._folder / "stop").touch()
        results = self.running.collect(limit_s, grace_s=limit_s)
        assert not any(result.timed_out for result in results), results.describe()
        return results


@contextlib.contextmanager
def training(
    hosts: Hosts,
    placed: Sequence[int],
    folder: Path,
    *,
    options: Mapping[str, Any] | None = None,
    wire: str | None = None,
    env: Mapping[str, str] | None = None,
    zygotes: Mapping[int, Zygote] | None = None,
    **settings: Any,
) -> Iterator[Training]:
    """Ranks on these hosts (1, 2 ...) that train, with ``pycomm.Elastic(**settings)``.

    ``zygotes``: of some ranks another than that of their host.
    """
    folder.mkdir(parents=True, exist_ok=True)
    course = Course(str(folder), Plan(wire, settings=tuple(settings.items())))
    port = next(_ports)

    def environment(rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(placed)),
            "MASTER_ADDR": hosts.nodes[placed[0] - 1].name,
            "MASTER_PORT": str(port),
            **(env or {}),
        }

    def zygote_of(rank: int) -> Zygote:
        return (zygotes or {}).get(rank) or hosts.zygotes[hosts.nodes[placed[rank] - 1].name]

    hosts.heal()
    with start_ranks(
        len(placed),
        trains_until_told,
        args=(course,),
        init="env://",
        env=environment,
        pg_options={"heartbeat_timeout": SILENCE_S, **(options or {})},
        zygote_of=zygote_of,
    ) as running:
        yield Training(hosts, running, placed, course)


def raised_within(results: RankResults, ranks: Collection[int], since: float) -> float:
    """The seconds until all of these ranks had raised."""
    errors = [results[rank].value["error"] for rank in ranks if results[rank].ok]
    return max([error.monotonic_s - since for error in errors if error], default=0.0)


def check(
    run: Training,
    results: RankResults,
    goes_on: Sequence[int],
    *,
    killed: Collection[int] = (),
    behind: Mapping[int, str] | None = None,
    left: Collection[int] = (),
    splits: bool = False,
) -> None:
    """What each rank has done, and that all who committed a step committed the same.

    Args:
        goes_on: They trained to the end, at the end alone.
        killed: Ended by SIGKILL.
        behind: Raised, each one of these classes ("|" between them).
        left: In order.
        splits: Two sides may have gone on: ``split_brain="accept"``.
    """
    text = results.describe()
    behind = behind or {}
    for result in results:
        rank = result.rank
        if rank in killed:
            assert result.exit_code == -signal.SIGKILL, text
            continue
        assert result.ok, text
        error = result.value["error"]
        if rank in behind:
            assert error is not None, f"rank {rank} raised nothing\n{text}"
            assert any(error.is_a(name) for name in behind[rank].split("|")), f"{error}\n{text}"
        else:
            assert error is None, text
    notes = {result.rank: run.notes(result.rank) for result in results}
    tolerance = TOLERANCES[run.course.plan.wire]
    steps: dict[int, dict[tuple[int, ...], str]] = {}
    for rank, each in notes.items():
        assert [note.step for note in each] == list(range(len(each))), f"rank {rank}: {each}"
        for note in each:
            assert note.off <= tolerance, f"rank {rank}: {note}"
            assert rank in note.members
            bits = steps.setdefault(note.step, {}).setdefault(note.members, note.bits)
            assert bits == note.bits, f"step {note.step} has other bits on rank {rank}: {note}"
            assert len(steps[note.step]) == 1 or splits, f"two sides: {steps[note.step]}\n{text}"
    last = {len(notes[rank]) for rank in goes_on}
    assert len(last) <= 1, last
    for rank in goes_on:
        assert notes[rank][-1].members == tuple(goes_on), text
        lost = results[rank].value["stats"]["lost_ranks"]
        assert lost == len(notes) - len(goes_on) - len(left), text
        # A step that another rank has committed beyond them would be lost.
        assert splits or all(len(each) <= len(notes[rank]) for each in notes.values())
