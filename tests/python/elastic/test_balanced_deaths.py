"""Ranks of a balanced training are killed at any moment: batches stay whole, and no index is lost.

Loaders with 0, 2 and 4 workers run ahead by different numbers of batches.
"""

from __future__ import annotations

import collections
import itertools
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from elastic_deals import Plan, dealt, trains
from ranks import TORCH_DDP, RankResults, start_ranks

from pycomm.balance.deal import epoch_order

pytestmark = [pytest.mark.needs_native, pytest.mark.faults, pytest.mark.timeout(200)]


def start(plan: Plan) -> Any:
    return start_ranks(
        len(plan.workers),
        trains,
        args=(plan,),
        preload=TORCH_DDP,
        env={"OMP_NUM_THREADS": "1"},
    )


def check(results: RankResults, plan: Plan, dead: Sequence[int]) -> dict[str, Any]:
    """Raises AssertionError unless all who live were dealt whole batches of all indices."""
    values = {}
    for result in results:
        if result.rank in dead:
            assert result.exit_code == -signal.SIGKILL, results.describe()
        else:
            assert result.ok and result.value["error"] is None, results.describe()
            values[result.rank] = result.value
    one = next(iter(values.values()))
    for value in values.values():
        for name in ("members", "epochs", "means", "weights"):
            assert value[name] == one[name], (name, results.describe())
    members = [tuple(each) for each in one["members"] if each]
    assert members[0] == tuple(range(len(results))) and members[-1] == tuple(values)
    batches = {rank: dealt(plan.folder, rank) for rank in range(len(results))}
    since = [n for n in range(1, len(members)) if members[n] != members[n - 1]]
    window = plan.lookahead + plan.accumulate - 1
    trained: collections.Counter[int] = collections.Counter()
    for number, now in enumerate(members):
        indices = [index for rank in now for index in batches[rank][number]]
        lacks = any(begin <= number < begin + window for begin in since)
        assert (len(indices) < plan.global_batch) == lacks, (number, since)
        assert len(indices) <= plan.global_batch
        trained.update(indices)
    assert since[-1] + window < sum(one["epochs"][:-1]), "a death too late to say anything"
    begins = [0, *itertools.accumulate(one["epochs"])]
    unevens = {
        epoch + later  # what a death leaves comes back in its epoch, or in the next one
        for epoch, (begin, end) in enumerate(itertools.pairwise(begins))
        for death in since
        for later in (0, 1)
        if begin <= death + window and death < end
    }
    # An epoch lacks nothing but the end of its order: what does not fill a batch.
    remainders: collections.Counter[int] = collections.Counter()
    for epoch in range(plan.epochs):
        order = epoch_order(plan.length, seed=0, epoch=epoch, shuffle=True).tolist()
        uneven = epoch in unevens
        most = plan.global_batch - 1 if uneven else plan.length % plan.global_batch
        remainders.update(order[plan.length - most :])
    # A last pass that waits for others of its step is not committed.
    for number in range(len(members), sum(one["epochs"])):
        remainders.update(index for rank in members[-1] for index in batches[rank][number])
    every = collections.Counter(dict.fromkeys(range(plan.length), plan.epochs))
    assert not trained - every, "an index was trained more often than there are epochs"
    lost_indices = every - trained - remainders
    assert not lost_indices, (lost_indices, since, one["epochs"])
    whole = len(members) * plan.global_batch
    lost = whole - sum(trained.values())
    assert len(members) == sum(one["epochs"]) // plan.accumulate * plan.accumulate
    assert lost < (plan.lookahead + plan.accumulate) * plan.global_batch * len(since)
    return one


@pytest.mark.parametrize(
    ("workers", "dead", "accumulate"),
    [((0, 4), [1], 1), ((2, 0, 4), [0], 1), ((4, 2, 0), [1], 2), ((0, 2, 4, 0), [2, 3], 1)],
)
def test_a_rank_is_killed(
    tmp_path: Path, workers: tuple[int, ...], dead: list[int], accumulate: int
) -> None:
    plan = Plan(str(tmp_path), workers, accumulate=accumulate, held=tuple(dead))
    with start(plan) as running:
        for rank in dead:
            running.wait_for_mark(rank, "step 10")
            time.sleep(random.random() * 0.05)
            running.kill(rank)
        results = running.collect(120)
    one = check(results, plan, dead)
    assert f"arguments over all {len(workers)} ranks of the model's process group" in one["late"]
    left = tuple(rank for rank in range(len(workers)) if rank not in dead)
    assert one["stats"]["members"] == left
