"""Runs programs of collectives on rank processes that stay alive from one program to the next.

    parent                                  rank 0 … 4
    ProgramRanks.run(program)   -- pickle -->  run_program: launch, wait, compare with the oracle
    compares digests of ranks  <-- pickle --   [Outcome, …], one a call

A program that breaks a group, or hangs, ends the processes; the next one gets new ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collective_calls import ALIKE, Call, Launched, bits, difference, launch
from idle import check_idle
from ranks import Ranks, start_ranks

WORLD = 5
# Every group that a program may use; the ranks open all of them at the start.
GROUPS: list[tuple[int, ...]] = [
    (0, 1),
    (0, 1, 2),
    (0, 1, 2, 3),
    (0, 1, 2, 3, 4),
    (0,),
    (1,),
    (0, 2),
    (1, 2),
    (1, 3),
    (0, 2, 3),
    (1, 2, 4),
    (0, 1, 3, 4),
]
_CALL_TIMEOUT_S = 30.0
_PROGRAM_TIMEOUT_S = 80.0


@dataclasses.dataclass(frozen=True)
class Program:
    """Calls that the first ``ranks`` ranks issue in this order, each those of its own groups."""

    ranks: int
    calls: tuple[Call, ...]


@dataclasses.dataclass
class Outcome:
    """What one rank saw of one call."""

    wrong: str = ""
    refused: str = ""
    digest: str = ""


def _conclude(call: Call, launched: Launched, member: int) -> Outcome:
    try:
        result = launched.result()
        wrong = difference(call, result, member)
        if not launched.source_is_unchanged():
            wrong = wrong or "the input was changed"
    except Exception:
        # The other ranks must find this one in the calls that follow.
        return Outcome(wrong=traceback.format_exc())
    alike = call.collective in ALIKE
    return Outcome(wrong=wrong, digest=hashlib.sha256(bits(result)).hexdigest() if alike else "")


def run_program(rank: int, program: Program, groups: dict[Any, Any]) -> list[Outcome | None]:
    """One rank's part: None for calls of groups that it is not in."""
    outcomes: list[Outcome | None] = [None] * len(program.calls)
    pending: list[tuple[int, int, Launched]] = []

    def wait_for_due(now: int) -> None:
        for due, index, launched in sorted(pending, key=lambda entry: entry[:2]):
            if due <= now:
                pending.remove((due, index, launched))
                launched.work.wait()
                call = program.calls[index]
                outcomes[index] = _conclude(call, launched, call.group.index(rank))

    for index, call in enumerate(program.calls):
        if rank in call.group:
            member = call.group.index(rank)
            try:
                launched = launch(call, member, groups[call.group])
            except (RuntimeError, ValueError) as error:
                wrong = "" if call.refusal() else traceback.format_exc()
                outcomes[index] = Outcome(wrong=wrong, refused=str(error))
            else:
                if launched.work is None:
                    outcomes[index] = _conclude(call, launched, member)
                else:
                    pending.append((index + call.waits[rank % 2], index, launched))
        wait_for_due(index)
    wait_for_due(1 << 30)
    check_idle()
    return outcomes


def serve(rank: int, world_size: int, address: str) -> None:
    """A rank: runs what comes until there is nothing more."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in GROUPS}
    with Client(address) as parent:
        parent.send(rank)
        while (program := parent.recv()) is not None:
            try:
                answer: Any = run_program(rank, program, groups)
            except Exception:
                answer = traceback.format_exc()
            parent.send(answer)


class ProgramRanks:
    """The rank processes, started when first needed and again after a program has broken them."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._connections: list[Connection] = []
        self._running: Ranks | None = None

    def __enter__(self) -> ProgramRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        folder = self._open.enter_context(tempfile.TemporaryDirectory(prefix="pycomm-programs-"))
        address = str(Path(folder) / "socket")
        listener = self._open.enter_context(Listener(address, backlog=WORLD))
        self._running = self._open.enter_context(
            start_ranks(WORLD, serve, args=(address,), init_timeout_s=_CALL_TIMEOUT_S)
        )
        by_rank: dict[int, Connection] = {}
        listener._listener._socket.settimeout(60.0)  # type: ignore[attr-defined]
        for _ in range(WORLD):
            connection = self._open.enter_context(listener.accept())
            by_rank[connection.recv()] = connection
        self._connections = [by_rank[rank] for rank in range(WORLD)]

    def close(self) -> None:
        """Ends the ranks, orderly where they are."""
        if self._running is not None:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.send(None)
            self._running.collect(10.0)
        self._connections, self._running = [], None
        self._open.close()

    def outcomes(self, program: Program) -> list[list[Outcome | None]]:
        """Runs a program. Raises AssertionError, with every rank's story, if a rank does not."""
        if self._running is None:
            self._start()
        connections = self._connections[: program.ranks]
        for connection in connections:
            connection.send(program)
        answers: list[Any] = []
        for connection in connections:
            try:
                ready = connection.poll(_PROGRAM_TIMEOUT_S)
                answers.append(connection.recv() if ready else "no answer: it hangs")
            except (EOFError, ConnectionError):
                answers.append("no answer: the process has ended")
        broken = [
            f"--- rank {rank}\n{answer}"
            for rank, answer in enumerate(answers)
            if isinstance(answer, str)
        ]
        if broken:
            if any("no answer" in answer for answer in broken):
                assert self._running is not None
                broken.append(self._running.collect(0.0).describe())
            self.close()
            raise AssertionError("\n".join(broken))
        return answers

    def check(self, program: Program) -> None:
        """Runs a program and compares every call's outcome with what it must be."""
        outcomes = self.outcomes(program)
        problems = [
            f"call {index}: {problem}"
            for index, call in enumerate(program.calls)
            for problem in problems_of(call, {r: outcomes[r][index] for r in call.group})
        ]
        assert not problems, "\n".join(problems)


def problems_of(call: Call, outcomes: dict[int, Outcome | None]) -> Iterator[str]:
    """Describes every mistake in the outcomes of one call on the ranks of its group."""
    refusal = call.refusal()
    for rank, outcome in outcomes.items():
        if outcome is None:
            yield f"rank {rank} took no part"
        elif refusal and not outcome.refused:
            yield f"rank {rank} did not raise {refusal!r}"
        elif refusal and refusal not in outcome.refused:
            yield f"rank {rank} raised {outcome.refused!r} and not {refusal!r}"
        elif outcome.wrong:
            yield f"rank {rank}: {outcome.wrong}"
    digests = {outcome.digest for outcome in outcomes.values() if outcome is not None}
    if len(digests) > 1:
        yield "ranks have different bits"
