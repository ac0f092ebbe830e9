"""Programs in which processes make other numbers of groups, hooks and barriers than others."""

from __future__ import annotations

import time

import pytest
import rings
import torch.distributed as dist
from group_programs import POOL, Program, Step, random_program, run_process, smaller
from ranks import TORCH_DDP, RankResults, run_ranks

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(900)]

PROGRAMS, PER_CASE = 300, 5
_LIMIT_S = 60.0
_SHORTENING_S = 120.0

THREE = Step("job", members=(0, 1, 2))
PAIR = Step("new_group", 1, (0, 1))
SINGLE = Step("new_group", 2, (0,))
NAMED: dict[str, Program] = {
    "sync_every after groups of some ranks": (
        *(THREE, PAIR, SINGLE, Step("sync_every", 0)),
        *(Step("sync_every", 1), Step("sync_every", 2)),
    ),
    "hooks on a pair, then on all": (
        *(THREE, PAIR, SINGLE, Step("hook", 2, hook="ours", wrapper=0)),
        *(Step("hook", 1, hook=hook, wrapper=1) for hook in ("ours", "ordered", "top_k")),
        *(Step("hook", 0, hook=hook, wrapper=2) for hook in ("ours", "ordered", "top_k")),
        Step("hook", 0, hook="ordered without a group", wrapper=3),
    ),
    "survivors and a new process": (
        *(THREE, Step("hook", 0, hook="ours", wrapper=0), Step("barrier"), Step("barrier")),
        Step("job", members=(3, 1, 0)),
        *(Step("barrier"), Step("hook", 0, hook="ours", wrapper=0), Step("sync_every")),
    ),
}


class _Runner:
    def __init__(self) -> None:
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self._runs = 0

    def run(self, program: Program) -> RankResults:
        self._runs += 1
        used = sorted({each for step in program if step.what == "job" for each in step.members})
        return run_ranks(
            POOL,
            run_process,
            args=(self._store.port, str(self._runs), program),
            init="none",
            ranks=used,
            preload=TORCH_DDP,
            timeout_s=_LIMIT_S,
            check=False,
        )


@pytest.mark.parametrize("name", NAMED)
def test_what_a_rank_did_elsewhere_does_not_count(name: str) -> None:
    _Runner().run(NAMED[name]).check()


@pytest.mark.ci
@pytest.mark.parametrize("first", rings.first_of(range(0, PROGRAMS, PER_CASE), 2))
def test_groups_of_ranks_with_different_pasts(first: int) -> None:
    runner = _Runner()
    for seed in range(first, first + PER_CASE):
        program = random_program(seed)
        results = runner.run(program)
        if not all(each.ok for each in results):
            program, results = _shortest(runner, program, results)
            steps = "\n".join(map(str, program))
            raise AssertionError(f"seed {seed}:\n{steps}\n{results.describe()}")


def _shortest(
    runner: _Runner, program: Program, results: RankResults
) -> tuple[Program, RankResults]:
    """Leaves out steps as long as the program still fails and there is time."""
    deadline = time.monotonic() + _SHORTENING_S
    shorter = True
    while shorter:
        shorter = False
        for candidate in smaller(program):
            if time.monotonic() > deadline:
                break
            found = runner.run(candidate)
            if not all(each.ok for each in found):
                program, results, shorter = candidate, found, True
                break
    return program, results
