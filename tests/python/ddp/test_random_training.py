"""Random training programs on 2 to 4 ranks, against a plain model and averages by hand."""

from __future__ import annotations

import time
from typing import Any

import pytest
import rank_pool
import torch.distributed as dist
from ranks import TORCH_DDP
from training_programs import Program, random_program, smaller
from training_ranks import TIMEOUT_S, serve_training

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(7200)]

MOST_RANKS = 4
_SHORTENING_S = 60.0
_FAILURES = 3
"""After so many the rest is not tried."""


class TrainingRanks(rank_pool.RankPool):
    """The rank processes; programs meet in a store that this process holds."""

    def __init__(self) -> None:
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self._programs = 0
        super().__init__(
            MOST_RANKS,
            serve_training,
            patience_s=4 * TIMEOUT_S,
            args=(self._store.port,),
            init="none",
            preload=TORCH_DDP,
        )

    def wrong(self, program: Program) -> str:
        """What the ranks have to complain of, or ""."""
        self._programs += 1
        answers: list[Any] = self.answers((self._programs, program), program.ranks)
        return rank_pool.stories(answers)

    def shortest(self, program: Program, wrong: str) -> str:
        """The program with as few steps as still fail, and how it does."""
        deadline = time.monotonic() + _SHORTENING_S
        shorter = True
        while shorter and time.monotonic() < deadline:
            shorter = False
            for candidate in smaller(program):
                if time.monotonic() < deadline and (found := self.wrong(candidate)):
                    program, wrong, shorter = candidate, found, True
                    break
        return f"{program}\n{wrong}"


def test_random_training(request: pytest.FixtureRequest) -> None:
    """`--trainings 5000` runs that many, `--trainings 7:8` seed 7 alone."""
    first, _, last = request.config.getoption("--trainings").rpartition(":")
    failures: list[str] = []
    with TrainingRanks() as ranks:
        for seed in range(int(first or 0), int(last)):
            program = random_program(seed)
            if wrong := ranks.wrong(program):
                failures.append(ranks.shortest(program, wrong))
            if len(failures) == _FAILURES:
                break
    assert not failures, "\n\n".join(failures)
