"""Random training programs on 2 to 4 ranks, against a plain model and averages by hand."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import rank_pool
import torch.distributed as dist
from ranks import TORCH_DDP
from training_programs import LOCAL, WRAPPER, Program, Step, random_program, smaller
from training_ranks import TIMEOUT_S, WRONG, serve_training

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(7200)]

_TABLE = {"wire_dtype": {"parts.0.*": "int8"}}
_FULL = Step("full step")


def _named(
    parts: str,
    steps: list[Step],
    ranks: int = 2,
    hook: str = "",
    trainer: str = WRAPPER,
    **options: Any,
) -> Program:
    kinds = tuple(parts.split())
    return Program(0, ranks, "tcp", kinds, trainer, tuple(options.items()), hook, tuple(steps))


# Each is one order of steps that random programs seldom draw; every run of this file has them all.
NAMED: dict[str, Program] = {
    "ignored": _named("linear ignored", [_FULL, _FULL, _FULL, Step("sync")], sync_every=2),
    "frozen between syncs": _named(
        "linear linear", [_FULL, _FULL, Step("freeze", part=0), _FULL, Step("sync")], sync_every=4
    ),
    "in eval": _named("linear", [Step("mode", "eval"), _FULL, _FULL, _FULL, _FULL], sync_every=2),
    "dropped": _named("table linear", [_FULL, Step("dropped", "one Inf"), _FULL, _FULL], **_TABLE),
    "join after freezing": _named(
        "linear linear", [_FULL, Step("freeze", part=0), Step("join", counts=(0, 3, 0))], ranks=3
    ),
    "copy": _named("linear", [_FULL, _FULL, Step("copy"), _FULL, _FULL], static_graph=True),
    "static graph that begins in no_sync": _named(
        "linear embedding",
        [Step("freeze", part=0), Step("local pass"), Step("pass"), _FULL],
        static_graph=True,
    ),
    "error behind the last gradient": _named("linear", [_FULL, Step("broken")]),
    "complex": _named("complex linear", [_FULL, _FULL], hook="allreduce"),
    "unfrozen between syncs": _named(
        "base linear",
        [_FULL, Step("unfreeze", part=0), Step("adopt"), _FULL, Step("sync"), Step("stats")],
        trainer="LocalSGD",
        sync_every=4,
    ),
    "frozen, with momentum": _named(
        "linear bf16",
        [_FULL, _FULL, Step("freeze", part=0), *[_FULL] * 3, Step("unfreeze", part=0), _FULL],
        trainer="DiLoCo",
        sync_every=1,
    ),
    "frozen in flight": _named(
        "linear table",
        [
            *[_FULL] * 3,
            Step("freeze", part=1),
            *[_FULL] * 6,
            Step("unfreeze", part=1),
            *[_FULL] * 2,
            Step("freeze", "on rank 0", part=0),
            *[_FULL] * 4,
            Step("sync"),
        ],
        trainer="StreamingDiLoCo",
        sync_every=3,
        fragment_sync_delay=1,
    ),
    "frozen, with an error": _named(
        "linear table",
        [_FULL, Step("freeze", part=1), *[_FULL] * 3, Step("resume"), _FULL],
        trainer="SparseLoCo",
        sync_every=1,
    ),
    **{
        f"{trainer} loaded alone": _named(
            "linear",
            [
                *(_FULL, Step("save"), *[_FULL] * 2, Step("load alone"), *[_FULL] * 3),
                *(Step("sync"), Step("stats")),
            ],
            trainer=trainer,
            sync_every=2,
        )
        for trainer in LOCAL[1:]
    },
    "loaded alone after a fragment of a state": _named(
        "linear",
        [*[_FULL] * 3, Step("save"), Step("load"), _FULL, Step("load alone"), Step("sync")],
        trainer="StreamingDiLoCo",
        sync_every=3,
        fragment_sync_delay=1,
    ),
    "local after unused forward": _named(
        "linear",
        [Step("unused forward"), Step("local pass"), Step("pass"), Step("pass")],
        accumulate=2,
    ),
    "two backwards": _named(
        "linear",
        [Step("two backwards", "of two forwards"), _FULL, Step("two backwards", "of one forward")],
    ),
    "two steps in flight": _named(
        "linear",
        [*[_FULL] * 5, Step("stats"), *[_FULL] * 3, Step("sync"), Step("stats")],
        trainer="StreamingDiLoCo",
        sync_every=3,
        fragment_sync_delay=2,
    ),
    "encoded without error feedback": _named(
        "table linear", [_FULL, _FULL], error_feedback=False, **_TABLE
    ),
    "join encoded": _named("table linear", [_FULL, Step("join", counts=(1, 3)), _FULL], **_TABLE),
    "freeze encoded": _named(
        "table linear",
        [_FULL, Step("freeze", part=0), _FULL, Step("unfreeze", part=0), _FULL],
        **_TABLE,
    ),
    "unused encoded": _named(
        "table linear",
        [_FULL, *[Step("full step", without=((0,), (0,)))] * 2, _FULL],
        find_unused_parameters=True,
        **_TABLE,
    ),
    "two futures": _named("linear table", [_FULL] * 8, hook="two futures"),
    "saved beside a hook": _named(
        "table linear", [_FULL, Step("save"), Step("load"), _FULL], hook="allreduce", **_TABLE
    ),
    "callbacks": _named(
        "linear table",
        [Step("callback", how) for how in ("nested", "of half the ranks", "of a message")]
        + [_FULL, Step("callback", "in backward"), Step("callback", "average"), _FULL],
        hook="metric",
        ranks=4,
    ),
    "kept and unused, and sparse": _named(
        "linear linear sparse",
        [_FULL, *[Step("pass", without=((1, 2), (1, 2)))] * 2],
        find_unused_parameters=True,
    ),
    "kept over passes of unequal weight, and unused": _named(
        "linear scalars",
        [_FULL, *[Step("pass", without=((1,), (1,)), weights=(w, 1.0)) for w in (50.0, 1.0)]],
        find_unused_parameters=True,
        accumulate=2,
        weight="samples",
    ),
    "frozen before a local pass without weight": _named(
        "linear linear",
        [Step("freeze", part=1), Step("local pass", weights=(0.0, 0.1)), _FULL],
        weight="samples",
    ),
    "used in a local pass without weight alone": _named(
        "linear embedding",
        [
            Step("local pass", without=((0,), (0,)), weights=(0.0, 0.0)),
            Step("pass", without=((1,), (1,))),
        ],
        find_unused_parameters=True,
        weight="samples",
    ),
    "nothing but zeros behind a local pass without weight": _named(
        "linear scalars",
        [Step("local pass", weights=(0.0, 0.0)), Step("pass")],
        find_unused_parameters=True,
        weight="samples",
    ),
    "asks in backward": _named("linear", [_FULL, _FULL], hook="asks"),
    "a scale beside forward, accumulated": _named(
        "linear beside", [Step("pass")] * 6, accumulate=3
    ),
    "a returned scale, accumulated": _named("linear returned", [Step("pass")] * 4, accumulate=2),
    "a scale beside forward, weighed in no_sync": _named(
        "linear beside",
        [Step("local pass", weights=(50.0, 1.0)), Step("pass", weights=(7.0, 3.5))],
        weight="samples",
    ),
    "a scale beside forward, without samples": _named(
        "linear beside",
        [Step("local pass", weights=(7.0, 3.5)), Step("local pass", weights=(0.0, 1.0)), _FULL],
        weight="samples",
    ),
    "unfrozen before a local pass": _named(
        "linear linear",
        [Step("freeze", part=1), _FULL, Step("zero", "to none"), Step("unfreeze locally", part=1)],
        find_unused_parameters=True,
    ),
    "derivatives of two forwards": _named(
        "linear",
        [Step("derived", "of two forwards"), Step("derived", "in no_sync"), Step("derived")],
    ),
    "derivatives, weighed": _named(
        "linear", [Step("derived", "in no_sync"), Step("derived")], weight="samples"
    ),
    "a loss of a forward in no_sync and of one outside, weighed": _named(
        "linear linear",
        [Step("joined", "no_sync first"), Step("joined", "no_sync last")],
        weight="samples",
    ),
    "a forward of another wrapper before the backward of a loss in an object": _named(
        "linear linear", [Step("hidden"), _FULL, Step("hidden"), Step("pass"), Step("hidden")]
    ),
    "past the wrapper of a static graph": _named(
        "linear linear", [Step("past", "on all ranks"), _FULL, _FULL, _FULL], static_graph=True
    ),
    "past the wrapper of a static graph, on one rank": _named(
        "linear linear", [Step("past", "on rank 0"), _FULL, _FULL, _FULL], static_graph=True
    ),
    "a scale beside forward, of unequal accumulated passes": _named(
        "linear returned",
        [Step("pass", weights=(50.0, 1.0)), Step("pass", weights=(7.0, 3.5))],
        weight="samples",
        accumulate=2,
    ),
}

MOST_RANKS = 4
LINES = 20
"""The most that a printed random program has."""
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
        """The complaints of the ranks, or ""."""
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


def test_named_programs() -> None:
    with TrainingRanks() as ranks:
        for name, program in NAMED.items():
            wrong = ranks.wrong(program)
            assert not wrong, f"{name}\n{program}\n{wrong}"


def test_wrong_sums_in_int8_are_noticed() -> None:
    with TrainingRanks() as ranks:
        for wrong in WRONG:
            program = _named("table linear", [_FULL], hook=f"wrong: {wrong}", **_TABLE)
            # All of the table's mean is less than a twentieth of the largest gradient.
            program = dataclasses.replace(program, seed=2)
            assert "parts.0.rows: element" in ranks.wrong(program), wrong


def test_a_random_training_program_is_short() -> None:
    lines = [len(str(random_program(seed)).splitlines()) for seed in range(500)]
    assert max(lines) <= LINES
    assert sum(lines) > 10 * len(lines)


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
