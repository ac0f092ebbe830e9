"""Random programs of BalancedSampler: they save and load at any moment. The oracle is a plain list.

The model is a stand-in, see step_logs.py. Deaths are in test_sampler_joins.py.
"""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest
import rings
from step_logs import Job

from pycomm.balance.balanced_sampler import BalancedSampler
from pycomm.balance.deal import epoch_order

BATCH, EPOCHS = 12, 4


class Pass(NamedTuple):
    epoch: int
    batches: list[list[int]]
    """By rank."""


class Program:
    """A job, and the moments in which it is restarted: after ``set_epoch()``, after a loader has
    begun, and after each pass.

    Args:
        cuts: Of the moments, counted over all restarts; True: with the passes that wait for a
            reduction, as of a checkpoint that has the wrapper's state, too.
    """

    def __init__(self, seed: int, cuts: Mapping[int, bool]) -> None:
        pick = random.Random(seed)
        self.accumulate = 1 + seed % 4
        self.ranks = pick.randint(1, 3)
        self.lookahead = pick.randint(2 * self.accumulate, 12)
        self.length = pick.randint(2 * BATCH, 9 * BATCH)
        self.speeds = [pick.choice([1.0, 1.0, 2.0, 4.0]) for _ in range(self.ranks)]
        self.ahead = [
            pick.randint(0, self.lookahead - 2 * self.accumulate) for _ in range(self.ranks)
        ]
        self.cuts = cuts
        self.moments = 0
        self.passes: list[Pass] = []
        self.open = 0  # the last ones of these, which wait for a reduction
        self.steps = 0
        self.begin(Job(self.ranks))

    def begin(self, job: Job) -> None:
        self.job = job
        self.samplers = [
            BalancedSampler(
                range(self.length), global_batch=BATCH, model=log, lookahead=self.lookahead
            )
            for log in job.logs
        ]

    def is_cut(self) -> bool:
        """A moment; whether the job was restarted in it."""
        kept = self.cuts.get(self.moments)
        self.moments += 1
        if kept is None:
            return False
        states = {json.dumps(sampler.state_dict()) for sampler in self.samplers}
        assert len(states) == 1
        self.begin(self.job.restarted())
        if not kept:
            del self.passes[len(self.passes) - self.open :]
            self.open = 0
        # The wrapper's part may be loaded before the sampler's or after it.
        for early in (True, False):
            if early == bool(self.moments % 2):
                for log in self.job.logs:
                    log.pending_passes = self.open
            else:
                for sampler in self.samplers:
                    sampler.load_state_dict(json.loads(min(states)))
        return True

    def loader(self, rank: int) -> Iterator[list[int]]:
        """It runs ahead, as one with workers."""
        batches = iter(self.samplers[rank])
        pulled: collections.deque[list[int]] = collections.deque()
        for batch in batches:
            pulled.append(batch)
            if len(pulled) > self.ahead[rank]:
                yield pulled.popleft()
        yield from pulled

    def train(self, epoch: int, batches: list[list[int]]) -> None:
        self.passes.append(Pass(epoch, batches))
        self.open += 1
        for log in self.job.logs:
            log.pending_passes = self.open
        if self.open < self.accumulate:
            return
        step = [each.batches for each in self.passes[-self.open :]]
        sizes = [sum(len(each[rank]) for each in step) for rank in range(self.ranks)]
        speeds = self.speeds if self.steps % 60 < 30 else self.speeds[::-1]
        noise = [1.0 + 0.01 * ((7 * self.steps + rank) % 5) for rank in range(self.ranks)]
        seconds = [
            (1.0 + size * speed) * each
            for size, speed, each in zip(sizes, speeds, noise, strict=True)
        ]
        self.job.train(sizes, seconds, passes=self.open)
        self.job.returned()
        self.steps += 1
        self.open = 0

    def run_epoch(self, epoch: int) -> bool:
        """False: the job was restarted in it, and is to begin with this epoch."""
        for sampler in self.samplers:
            sampler.set_epoch(epoch)
        if self.is_cut():
            return False
        loaders = [self.loader(rank) for rank in range(self.ranks)]
        first = [next(loader, None) for loader in loaders]
        if self.is_cut():
            return False
        while None not in first:
            self.train(epoch, first)  # type: ignore[arg-type]
            if self.is_cut():
                return False
            first = [next(loader, None) for loader in loaders]
        assert first == [None] * self.ranks
        return True

    def run(self) -> list[Pass]:
        epoch = 0
        while epoch < EPOCHS:
            if self.run_epoch(epoch):
                epoch += 1
        return self.passes

    def order(self, epoch: int) -> list[list[int]]:
        """The oracle: the epoch's list, cut into batches."""
        order = epoch_order(self.length, seed=0, epoch=epoch, shuffle=True).tolist()
        return [order[at : at + BATCH] for at in range(0, self.length - BATCH + 1, BATCH)]


def dealt(passes: list[Pass], epoch: int) -> list[list[int]]:
    return [
        [index for batch in each.batches for index in batch]
        for each in passes
        if each.epoch == epoch
    ]


def check(seed: int) -> int:
    """Returns how many passes were lost in an epoch that was over."""
    whole = Program(seed, {})
    passes = whole.run()
    for epoch in range(EPOCHS):
        assert dealt(passes, epoch) == whole.order(epoch)
    pick = random.Random(-1 - seed)
    moments = pick.sample(range(whole.moments), 3)
    assert Program(seed, dict.fromkeys(moments, True)).run() == passes, moments
    # A cut that loses passes moves the moments behind it.
    losing = Program(seed, {moment: pick.random() < 0.3 for moment in moments})
    found = losing.run()
    lost = 0
    for epoch in range(EPOCHS):
        wanted = losing.order(epoch)
        got = dealt(found, epoch)
        assert got == wanted[: len(got)], (epoch, losing.cuts)
        lost += len(wanted) - len(got)
    assert lost < 3 * max(1, losing.accumulate)
    return lost


@pytest.mark.parametrize("accumulate", range(1, 5))
def test_a_program_that_saves_and_loads_deals_what_the_other_one_does(accumulate: int) -> None:
    lost = [check(seed) for seed in range(accumulate - 1, 240, 4)]
    assert any(lost) == (accumulate > 1)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_whose_passes_are_not_loaded_begins_another_epoch(
    world_size: int, saves: bool
) -> None:
    """Each epoch has three batches, and a step two passes. On as many ranks the plan is loaded."""
    job = Job(1)
    (sampler,) = (BalancedSampler(range(36), global_batch=BATCH, model=log) for log in job.logs)
    for batch, indices in enumerate(sampler):
        job.logs[0].pending_passes = 1
        if batch == 1:
            job.train([2 * len(indices)], [1.0], passes=2)
            job.returned()
    sampler.set_epoch(1)
    state = json.loads(json.dumps(sampler.state_dict()))
    assert state["cursor"] == -1
    for _ in range(1 + saves):
        job = Job(world_size)
        samplers = [BalancedSampler(range(36), global_batch=BATCH, model=log) for log in job.logs]
        for each in samplers:
            each.load_state_dict(state)
            each.set_epoch(2)
        state = json.loads(json.dumps(samplers[0].state_dict()))
        assert (state["epoch"], state["cursor"]) == (2, 0)
    found = [index for step in zip(*samplers, strict=True) for part in step for index in part]
    assert found == epoch_order(36, seed=0, epoch=2, shuffle=True).tolist()


@pytest.mark.parametrize("part", rings.first_of(range(10), 0))
def test_thousands_of_them(part: int) -> None:
    for seed in range(1000 + 1000 * part, 2000 + 1000 * part):
        check(seed)
