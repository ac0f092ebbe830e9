"""Processes join a balanced training, and ranks of it die and leave: each sample counts once.

The oracle is the averaged gradient, which shows what each step has counted; see the rig.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import random
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rings
import torch
from balanced_joining import Plan, noted, trains
from elastic_training import SHARED, start_training
from log_lines import LogLines
from ranks import TORCH_DDP, RankResult, mark, start_ranks

from pycomm.balance.deal import epoch_order

pytestmark = [
    pytest.mark.ci,
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.timeout(200),
]

start = functools.partial(start_training, trains, options=SHARED)


def joining(plan: Plan, workers: int) -> Plan:
    return dataclasses.replace(plan, join=True, workers=(workers,))


def check(results: Sequence[RankResult], plan: Plan) -> list[dict[str, Any]]:
    """The notes of all; AssertionError unless all counted the same, and rightly."""
    text = "\n".join(result.describe() for result in results)
    assert all(result.ok or result.exit_code == -signal.SIGKILL for result in results), text
    values: list[dict[str, Any]] = [result.value for result in results if result.value is not None]
    assert all(value["error"] is None for value in values), text
    notes = noted(plan.folder)
    steps: dict[int, dict[str, Any]] = {}
    for process in notes:
        for step in process["steps"]:
            assert steps.setdefault(step["step"], step) == step, text
    numbers = sorted(steps)
    assert numbers == list(range(1, len(numbers) + 1)), text
    check_sizes([steps[number] for number in numbers], plan)
    for process in notes:
        check_newcomer(process, steps, plan)
    states = [value["state"] for value in values if "state" in value]
    assert states and all(each == states[0] for each in states)
    return notes


def check_sizes(steps: Sequence[dict[str, Any]], plan: Plan) -> None:
    """Whole batches but behind a death, and all indices of all epochs but for remainders.

    Batches divide an epoch. So only one to which indices have come back has a remainder, of the
    last indices of its order.
    """
    passes, whole = plan.accumulate, plan.accumulate * plan.global_batch
    assert plan.length % plan.global_batch == 0
    lost: list[int] = []
    uneven: set[int] = set()
    counted: collections.Counter[int] = collections.Counter()
    for number, step in enumerate(steps):
        assert step["off"] < 1e-5, step
        if number > 0 and set(steps[number - 1]["members"]) - set(step["members"]):
            lost.append(number)
        # The batches of a step that the dead were dealt, in part or all of it.
        spans = [range(since, since + 1 + -(-plan.lookahead // passes)) for since in lost]
        assert len(step["counted"]) <= whole
        if any(number in span for span in spans):
            uneven |= {step["epoch"], step["epoch"] + 1}
        else:
            assert len(step["counted"]) == whole, (step, lost)
        counted.update(step["counted"])
    epochs = steps[-1]["epoch"] + 1
    assert not lost or lost[-1] + plan.lookahead < len(steps) - 16, "a death too late for a check"
    assert max(counted.values()) <= epochs
    pending = (passes - 1) * plan.global_batch if lost else 0  # at the end, which no step reduces
    missing = {index: epochs - counted[index] for index in range(plan.length)}
    assert sum(missing.values()) <= len(uneven) * (plan.global_batch - 1) + pending
    for epoch in uneven:
        order = epoch_order(plan.length, seed=0, epoch=epoch, shuffle=True)
        for index in order[1 - plan.global_batch :].tolist():
            missing[index] -= 1
    assert sum(max(0, each) for each in missing.values()) <= pending, missing


def check_newcomer(process: dict[str, Any], steps: dict[int, dict[str, Any]], plan: Plan) -> None:
    """Its own share begins as many passes later as is said, and is part of each step then."""
    passes = plan.accumulate
    if not process["steps"]:
        return
    empty = [not each for each in process["passes"]]
    late = plan.lookahead + passes - 1 if process["steps"][0]["step"] > 1 else 0
    assert empty == [index < late for index in range(len(empty))]
    for index, step in enumerate(process["steps"]):
        mine = [each for one in process["passes"][index * passes :][:passes] for each in one]
        assert set(mine) <= set(steps[step["step"]]["counted"])


def is_alone_midway(
    rank: int, world_size: int, folder: str, join: bool, balanced: bool
) -> tuple[str, ...]:
    """How it ends if rank 1 of two dies when rank 0 has made the first of the two passes of a step,
    with ``accumulate`` or in ``no_sync()``, and a process waits for the state then."""
    import pycomm

    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options: dict[str, Any] = {"weight": "samples", "accumulate": 2} if balanced else {}
    lines = LogLines()
    ended = []
    try:
        model = pycomm.DistributedDataParallel(
            net,
            elastic=pycomm.Elastic(
                min_ranks=2,
                quorum_wait=12.0,
                peers=f"{folder}/peers",
                state=[optimizer],
                join=join,
                join_wait=14.0,
            ),
            **options,
        )
        batches: Any = [[number] for number in range(40)]
        if balanced:
            batches = pycomm.BalancedSampler(range(1000), global_batch=2, lookahead=4, model=model)
        for number, batch in enumerate(batches):
            if not join and number == 11:
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                mark("alone")
                assert lines.that_have("a process wants to join", within_s=60.0)
                time.sleep(0.5)  # it is reached
            with contextlib.nullcontext() if balanced or number % 2 else model.no_sync():
                model(torch.tensor(batch).reshape(-1, 1) / 1000).sum().backward()
    except pycomm.errors.PycommError as error:
        ended.append(type(error).__name__)
    return tuple(ended)


@pytest.mark.parametrize("balanced", [True, False], ids=["accumulate", "no_sync"])
def test_nobody_joins_in_the_middle_of_a_step(balanced: bool, tmp_path: Path) -> None:
    """A process would have none of its first passes. So nobody comes in time."""
    given = {"preload": TORCH_DDP, "pg_options": {**SHARED, "debug": "INFO"}}
    args = (str(tmp_path), False, balanced)
    with start_ranks(2, is_alone_midway, args=args, **given) as running:
        running.wait_for_mark(0, "alone")
        args = (str(tmp_path), True, balanced)
        with start_ranks(1, is_alone_midway, args=args, **given) as newcomer:
            (joined,) = newcomer.collect(60)
            results = running.collect(60)
    text = joined.describe() + results.describe()
    assert results[0].value == ("QuorumLostError",), text
    assert joined.value == ("RendezvousTimeoutError",), text


def goes_on_in_place(rank: int, world_size: int, folder: str, join: bool) -> tuple[Any, ...]:
    import pycomm

    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = pycomm.DistributedDataParallel(
        net,
        weight="samples",
        elastic=pycomm.Elastic(
            min_ranks=2, quorum_wait=60.0, peers=f"{folder}/peers", state=[optimizer], join=join
        ),
    )
    sampler = pycomm.BalancedSampler(range(1000), global_batch=2, lookahead=2, model=model)
    lines = LogLines()
    for batch in sampler:
        if not join and model.elastic.step == 5:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            assert lines.that_have("without rank 1", within_s=60.0)
            mark("alone")
        optimizer.zero_grad()
        model(torch.tensor(batch).reshape(-1, 1) / 1000).sum().backward()
        optimizer.step()
        if model.elastic.step == 15:
            break
    return model.elastic.members, sampler.stats().shares


def test_a_process_joins_in_the_place_of_a_rank_that_died_before_the_step(tmp_path: Path) -> None:
    """It is started when the other one knows of the death, and waits where it gives its state. The
    dead rank needs no sample of the batch any more."""
    given = {"preload": TORCH_DDP, "pg_options": SHARED}
    with start_ranks(2, goes_on_in_place, args=(str(tmp_path), False), **given) as running:
        running.wait_for_mark(0, "alone")
        with start_ranks(1, goes_on_in_place, args=(str(tmp_path), True), **given) as newcomer:
            (joined,) = newcomer.collect(60)
            results = running.collect(60)
    assert joined.ok, joined.describe() + results.describe()
    assert results[0].value == joined.value == ((0, 2), (1, 1))


CASES = [
    Plan("", most=4),
    Plan("", accumulate=2),
    Plan("", says=True),
    Plan("", workers=(2, 0)),
]


@pytest.mark.parametrize("case", rings.first_of(CASES, 2), ids=["most", "two", "says", "other"])
def test_a_process_joins_and_gets_a_share(case: Plan, tmp_path: Path) -> None:
    plan = dataclasses.replace(case, folder=str(tmp_path))
    with start(2, plan) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan, 2)) as newcomer:
            newcomer.wait_for_mark(0, "counts")
            (tmp_path / "end").touch()
            results = [*running.collect(90), *newcomer.collect(90)]
    notes = check(results, plan)
    assert notes[2]["steps"][0]["members"] == [0, 1, 2]
    assert 0 < max(map(len, notes[2]["passes"])) <= (plan.most or plan.global_batch)
    assert {result.value["most"] for result in results} == {(24, 24, plan.most or 24)}


@pytest.mark.parametrize("seed", rings.first_of(range(10), 2))
def test_ranks_join_die_and_leave(seed: int, tmp_path: Path) -> None:
    """2 to 4 ranks; at least one that was there when another one came stays."""
    pick = random.Random(seed)
    plan = Plan(str(tmp_path), accumulate=pick.choice([1, 1, 2]))
    with contextlib.ExitStack() as stack:
        founders = stack.enter_context(start(2, plan))
        founders.wait_for_mark(0, "step 10")
        every = [(founders, 0), (founders, 1)]
        alive = list(every)
        for number in range(7):
            if len(alive) < 2 or (len(alive) < 4 and pick.random() < 0.6):
                one = stack.enter_context(start(1, joining(plan, pick.choice([0, 2]))))
                one.wait_for_mark(0, pick.choice(["trains", "step 1", "counts"]))
                every.append((one, 0))
                alive.append((one, 0))
            else:
                running, rank = alive.pop(pick.randrange(len(alive)))
                running.kill(rank, pick.choice([signal.SIGKILL, signal.SIGTERM]))
                other, place = alive[0]
                other.wait_for_mark(place, "step 1")
            assert alive, number
        last = stack.enter_context(start(1, joining(plan, 0)))
        last.wait_for_mark(0, "step 60")
        (tmp_path / "end").touch()
        results = []
        for running in dict.fromkeys([*(each for each, _ in every), last]):
            results += running.collect(90)
    check(results, plan)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"samples": "out"}, "RuntimeError", "deal their batches with a BalancedSampler"),
        ({"then": "loads"}, "UnsupportedError", "A process that has joined has the members' pos"),
        ({"then": "makes another"}, "UnsupportedError", "has joined .* or has made one already"),
        ({"then": "begins anew"}, "RuntimeError", r"set_epoch\(0\) of BalancedSampler in a proc"),
        ({"global_batch": 48}, "ConfigMismatchError", "global_batch is 24 there and 48 in this"),
    ],
)
def test_a_process_that_joins_wrongly_is_told_so_and_the_others_go_on(
    changes: dict[str, Any], kind: str, text: str, tmp_path: Path
) -> None:
    plan = Plan(str(tmp_path))
    with start(2, plan) as running:
        running.wait_for_mark(0, "epoch 0")
        with start(1, dataclasses.replace(joining(plan, 0), **changes)) as newcomer:
            (wrong,) = newcomer.collect(60)
        with start(1, joining(plan, 0)) as newcomer:
            newcomer.wait_for_mark(0, "step 60")
            (tmp_path / "end").touch()
            results = [*running.collect(90), *newcomer.collect(90)]
    check(results, plan)
    error = wrong.value["error"]
    assert error.type_name == kind and re.search(text, error.text), wrong.describe()


def test_members_without_a_sampler_are_named(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), samples="out")
    with start(2, plan) as running:
        running.wait_for_mark(0, "trains")
        with start(1, dataclasses.replace(joining(plan, 0), samples="with")) as newcomer:
            (wrong,) = newcomer.collect(60)
        (tmp_path / "end").touch()
        running.collect(60)
    assert "whose members have no BalancedSampler" in wrong.value["error"].text
