"""Runs programs of collectives on the rank processes of a ``RankPool``, against an oracle.

Each rank launches its calls, waits for them and compares with the oracle; the parent compares the
digests of all ranks. A program that breaks a group ends the processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import rank_pool
import torch
import torch.distributed as dist
from collective_calls import ALIKE, Call, Launched, bits, difference, launch
from idle import check_idle

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


def serve_programs(rank: int, world_size: int, address: str) -> None:
    """A rank of the pool."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in GROUPS}
    rank_pool.serve(address, rank, lambda program: run_program(rank, program, groups))


class ProgramRanks(rank_pool.RankPool):
    """The rank processes for such programs."""

    def __init__(self) -> None:
        super().__init__(
            WORLD,
            serve_programs,
            patience_s=_PROGRAM_TIMEOUT_S,
            init_timeout_s=_CALL_TIMEOUT_S,
        )

    def outcomes(self, program: Program) -> list[list[Outcome | None]]:
        """Runs a program. Raises AssertionError, with every rank's story, if a rank does not."""
        answers = self.answers(program, program.ranks)
        if broken := rank_pool.stories(answers):
            self.close()  # a group may have failed
            raise AssertionError(broken)
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
